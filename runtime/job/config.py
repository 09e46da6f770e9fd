"""The job file: every setting of a training run, apart from the plan.

    model:      {name: vit, options: {depth: 8}}
    data:       {name: digits}
    parallel:   {mesh: "dp=2,pp=2,tp=2", schedule: 1f1b, microbatches: 4}
    train:      {epochs: 4, batch_size: 32, optimizer: {name: adam, lr: 1e-4}, clip: 1.0}
    checkpoint: {dir: out/checkpoints}
    log:        {path: out/log.jsonl}

Every section and every setting has a default. Relative paths, also those in "my_file.py:name", are relative to the
current directory, not to the job file: the same file serves runs in many places.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, create_model, model_validator

from quintsched.errors import UsageError
from quintsched.request import CompileRequest, Entry, entries

from .choices import BufferChoice, ContextMethod, LossOver, Precision, Proofs, StrictRules, TransportName, ZeroSplit
from .settings import Settings
from .sinks import SinkConfig
from .tensor_rules import read_rule

Names = Annotated[tuple[str, ...], Field(strict=False)]
Axis = Literal["dp", "pp", "tp", "cp", "ep"]
Sizes = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...],
    BeforeValidator(lambda given: (given,) if isinstance(given, int) else given),
    Field(strict=False, min_length=1),
]


def _rule_data(value: Any) -> Any:
    read_rule(value)
    return value


TensorRuleData = Annotated[str | dict[str, Any], PlainValidator(_rule_data)]
"""A rule as people write it; see `tensor_rules`."""


_UNSAID: dict[str, Any] = {"mesh": "dp=1", "schedule": "1f1b", "microbatches": 1}
"""What a job means that does not say what `compile` has to be given."""


def _field_of(entry: Entry) -> tuple[Any, Any]:
    """Return how a setting of the plan is read from a job file: its type and its field."""

    def check(value: Any) -> Any:
        try:
            return value if value is None and entry.default is None else entry.check(value)
        except UsageError as error:
            raise ValueError(str(error)) from None

    default = _UNSAID.get(entry.name, entry.default)
    return Annotated[Any, PlainValidator(check)], Field(default=default, description=entry.doc)


if TYPE_CHECKING:
    PlanSettings = Settings
else:
    PlanSettings = create_model(
        "PlanSettings", __base__=Settings, **{entry.name: _field_of(entry) for entry in entries()}
    )
    """The settings that a plan is compiled from, each as `quintsched.request` declares it."""


class ModelConfig(Settings):
    """The section `model`: what is trained."""

    name: str = "vit"
    """A built-in model, or a user's function: "my_file.py:build", which returns blocks, or a model that is split."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The options of that model."""
    tied: dict[str, Names] = Field(default_factory=dict)
    """Weights of a user's model that are one: {embedding: ["0.weight", "5.weight"]}; see `parallel.tied`."""
    pretrained: str | None = None
    """Weights to start from: a safetensors file, or a directory with `model.safetensors` or its index, under the names
    of the model that was split, in GPT-2's shape for "gpt" with `activation: gelu_tanh`, or under ours. A run that is
    resumed does not read them."""
    fresh: Names = ()
    """Patterns on names of weights that `pretrained` need not have: they keep their initial values."""
    strict: bool = True
    """Whether tensors of `pretrained` that no weight takes are an error."""


class DataConfig(Settings):
    """The section `data`: what it is trained on."""

    name: str = "digits"
    """"digits" (scikit-learn's), "mnist" (the IDX files in `path`), "text" (bytes; see `data.text`), or a user's
    function: "my_file.py:load"."""
    path: str | None = None
    """A directory with MNIST's four IDX files, gzipped or not, which wins over "digits"; for "text", a file, which wins
    over the source of Python's standard library."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Those of "text": {sequence: 128, max_bytes: null}; or those of a user's function. The others have none."""


class AutoConfig(Settings):
    """`parallel.auto`: the mesh, the schedule and all that a prediction can judge are chosen by `quintsched tune`."""

    world: int | None = Field(default=None, ge=1)
    """Ranks; none: as many processes as were started, or for `quintsched run` as this machine has devices, or cores."""
    hardware: str = "cpu"
    """What the ranks run on: a preset, a file, or "cpu": this machine, as `quintsched calibrate` has measured it."""
    axes: dict[Axis, Sizes] = Field(default_factory=dict)
    """Axes that are not free, and the sizes they may have: {tp: 1, pp: [2, 4]}."""


def spell_out_auto(parallel: Any) -> Any:
    """Return the section `parallel` with what `auto` stands for: `parallel: auto`, and `auto: true` in it."""
    if parallel == "auto":
        return {"auto": {}}
    if isinstance(parallel, dict) and isinstance(parallel.get("auto"), bool):
        return {**parallel, "auto": {} if parallel["auto"] else None}
    return parallel


class ParallelConfig(PlanSettings):
    """The section `parallel`: the plan, which is compiled or read from a file, and how it is carried out."""

    auto: AutoConfig | None = None
    """Chooses what the section does not say of the plan; see `auto`. `parallel: auto` leaves everything to it."""

    @model_validator(mode="before")
    @classmethod
    def _auto_spelled_out(cls, given: Any) -> Any:
        return spell_out_auto(given)

    @property
    def given(self) -> dict[str, Any]:
        """What the job says of the plan to compile: the settings that it names."""
        return {entry.name: getattr(self, entry.name) for entry in entries() if entry.name in self.model_fields_set}

    def request(self, **instead: Any) -> CompileRequest:
        """Return what is to be compiled, with some settings instead of the job's; raises `UsageError`."""
        return CompileRequest.of_data(_UNSAID | self.given | instead)

    elastic: bool = False
    """Whether the mesh has as many replicas (dp) as the processes that were started make, whatever `mesh` says."""
    plan: str | None = None
    """A plan file; it takes the place of the settings that a plan is compiled from."""
    context: ContextMethod = "ring"
    """How attention reaches over the slices of a sequence, where the mesh has cp."""
    rules: dict[str, TensorRuleData] = Field(default_factory=dict)
    """Which layers tp cuts, and how, beyond the usual ones: {"*.attention.q": column, "4.head": replicate}; names are
    those in the whole model, which begin with the number of a block. {cut: column, parts: 3} says of which fused blocks
    the outputs consist."""
    prove: Proofs = "foreign"
    """Which blocks run once, cut beside whole, before the first step: all but the built-in ones, "all", or "none"."""
    sequence_parallel: bool = False
    """Whether each rank of tp has a slice of the tokens wherever layers are not cut."""
    zero_split: ZeroSplit = "auto"
    """What of parameters ZeRO gives to replicas: equal segments ("element"), or whole ones ("parameter"); "auto": these
    for optimizers that work on whole parameters."""
    buffers: BufferChoice = "merge"
    """What replicas do about buffers that a forward changes: "merge" running statistics, so that they are those of one
    process over all microbatches; "sync" batch norms in every forward; take those of the "first"; or "refuse"."""
    bucket_mb: float = Field(default=25.0, gt=0)
    """Size in MB (10^6 bytes) above which a gradient bucket is reduced in several reductions."""
    balance: Literal["estimated", "measured"] = "estimated"
    """What a block costs when stages are cut: an estimate from its weights, or the time it takes on rank 0."""


class OptimizerConfig(Settings):
    """The optimizer."""

    name: Literal["sgd", "adam", "adamw"] = "adam"
    """One of torch's."""
    lr: float = Field(default=1e-3, ge=0)
    """The learning rate that the schedule's factor multiplies."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Of sgd."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Added to the gradient (sgd, adam) or taken off the weights (adamw)."""
    decay: Literal["all", "matrices"] = "all"
    """Which weights decay; "matrices" spares biases, norms, embeddings and what is tied to them, and what a module
    names in its attribute `undecayed`."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.999), strict=False
    )
    """Decay of the running means of adam and adamw."""

    @model_validator(mode="after")
    def _only_what_is_used(self) -> OptimizerConfig:
        unused = "betas" if self.name == "sgd" else "momentum"
        if unused in self.model_fields_set:
            raise ValueError(f"{self.name!r} has no {unused}")
        return self


class LearningRateConfig(Settings):
    """How the learning rate changes from step to step; `train.optimizer.learning_rate_factor` has the formula."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    """The shape of the way down, after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear rise."""
    min_factor: float = Field(default=0.0, ge=0, le=1)
    """What the learning rate ends at, as a fraction of `lr`."""


class TrainConfig(Settings):
    """The section `train`: the loop."""

    epochs: int = Field(default=1, ge=1)
    """Passes over the training samples."""
    batch_size: int = Field(default=32, ge=1)
    """Samples per step, over all microbatches and replicas together."""
    accumulate: int = Field(default=1, ge=1)
    """Into how many batches these are divided, whose gradients are added up before the optimizer steps."""
    loss: str | None = None
    """A function (output, targets) → a mean, or (sum, weight): "my_file.py:loss"; none: that of a model that was split,
    else cross-entropy."""
    loss_over: LossOver | None = None
    """What a loss is over that gives one number: "samples", "targets" (those that are not -100), "sum", "microbatch":
    that of each microbatch is meant; none: it is examined, and refused where microbatches cannot make it up."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer and its settings."""
    lr_schedule: LearningRateConfig = LearningRateConfig()
    """How the learning rate changes."""
    clip: float | None = Field(default=None, gt=0)
    """The largest global norm of the gradient; longer ones are scaled down to it."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Fixes the initial weights and the order of the samples."""
    patience: int | None = Field(default=None, ge=1)
    """Epochs without a better validation loss after which training stops."""
    max_skipped: int = Field(default=5, ge=0)
    """Steps in a row whose gradient is not finite, and which are skipped, after which the run stops and says where that
    arose; 0: it never does."""


class RuntimeConfig(Settings):
    """The section `runtime`: how it is executed."""

    transport: TransportName = "auto"
    """What carries the messages; "auto": NCCL where each rank has a GPU, else gloo; "local": threads of one process."""
    rules: StrictRules | None = None
    """Stricter rules than the transport's, for tests: a send waits for its receive; messages in NCCL's order."""
    precision: Precision = "float32"
    """Type to compute in; with bfloat16, gradients are added up and weights are stepped in float32."""
    compile: bool = False
    """Whether torch.compile compiles each stage."""
    cuda_graph: bool = False
    """Whether steps run from CUDA graphs, one for each shape of a batch: on one GPU, for models without dropout."""
    trace: str | None = None
    """A directory to write down in when each instruction ran, for `render --trace`; none: nothing is written."""
    trace_first: int = Field(default=2, ge=0)
    """The first step that is traced, counted from 0."""
    trace_steps: int = Field(default=8, ge=1)
    """How many steps are traced."""
    verify: bool = False
    """Whether messages carry a checksum that is checked, and ranks compare each collective before they begin it."""
    timeout_s: float = Field(default=300.0, gt=0)
    """The longest that one wait for other ranks may take, in seconds; with `compile` at least half an hour."""
    stall_after: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    """Seconds without progress after which a step counts as stalled; "auto": learnt from the steps before, at least
    ten (300 with `compile`). A first step may take a minute at least; set-up, loading and saving, `timeout_s`."""


class CheckpointConfig(Settings):
    """The section `checkpoint`: what survives the run."""

    dir: str | None = None
    """Directory of the checkpoints; none: nothing is saved."""
    every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0: one at the end of each epoch."""
    keep: int = Field(default=2, ge=1)
    """How many of the latest checkpoints stay."""
    background: bool = True
    """Whether checkpoints are written while training goes on; it takes the memory of a rank's state once more, on its
    host. Those of the format "dcp" never are."""
    format: Literal["native", "dcp"] = "native"
    """"native": a file per rank, for the plan that wrote it; "dcp": PyTorch's distributed format, for any mesh."""
    export: str | None = None
    """A directory for the trained weights, as `from_pretrained` of transformers reads them; none: not written."""


class LogConfig(Settings):
    """The section `log`: what is written down."""

    path: str | None = None
    """A file of JSON lines; none: no file."""
    every: int = Field(default=50, ge=1)
    """Steps between two lines."""
    sinks: Annotated[
        tuple[
            Annotated[SinkConfig, BeforeValidator(lambda given: {"name": given} if isinstance(given, str) else given)],
            ...,
        ],
        Field(strict=False),
    ] = ()
    """Who else takes the figures, each by name or as {name: wandb, options: {project: mine}}; see `sinks`."""


class JobConfig(Settings):
    """A whole job file."""

    model: ModelConfig = ModelConfig()
    """What is trained."""
    data: DataConfig = DataConfig()
    """What it is trained on."""
    parallel: ParallelConfig = ParallelConfig()
    """How the work is divided over ranks."""
    train: TrainConfig = TrainConfig()
    """The loop."""
    runtime: RuntimeConfig = RuntimeConfig()
    """How it is executed."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What survives the run."""
    log: LogConfig = LogConfig()
    """What is written down."""
