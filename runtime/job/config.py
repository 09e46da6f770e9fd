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

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, model_validator

from quintsched.collectives.choice import Means

from .choices import ContextMethod, Precision, StrictRules, TensorSplit, TransportName
from .settings import Settings, name_in

Numbers = Annotated[tuple[int, ...], Field(strict=False)]
Names = Annotated[tuple[str, ...], Field(strict=False)]
TensorSplitName = Annotated[str, PlainValidator(name_in(TensorSplit))]


def _mesh(value: object) -> object:
    """Check no more than the form; `quintsched.Mesh` knows the axes."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or not all(
        isinstance(axis, str) and type(size) is int and size > 0 for axis, size in value.items()
    ):
        raise ValueError(f"a mesh is text such as 'dp=2,pp=2', or a size for each axis, not {value!r}")
    return value


class ModelConfig(Settings):
    """The section `model`: what is trained."""

    name: str = "vit"
    """A built-in model, or a user's function: "my_file.py:build"."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The options of that model."""
    tied: dict[str, Names] = Field(default_factory=dict)
    """Weights of a user's model that are one: {embedding: ["0.weight", "5.weight"]}; see `parallel.tied`."""
    pretrained: str | None = None
    """Weights to start from, in GPT-2's shape: a safetensors file, or a directory with `model.safetensors` or its
    index; for "gpt" with `activation: gelu_tanh`. A run that is resumed does not read them."""


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


class ParallelConfig(Settings):
    """The section `parallel`: how the work is divided over ranks."""

    mesh: Annotated[str | dict[str, int], PlainValidator(_mesh)] = "dp=1"
    """Axes and sizes, outermost first: "dp=2,pp=2,tp=2" or {dp: 2, pp: 2, tp: 2}."""
    schedule: str = "1f1b"
    """The name of a pipeline schedule; `quintsched schedules` lists them."""
    microbatches: int = Field(default=1, ge=1)
    """Microbatches per step and data-parallel replica."""
    chunks: int = Field(default=1, ge=1)
    """Stages per pipeline rank."""
    slices: int = Field(default=1, ge=1)
    """Slices of a microbatch's sequence, for schedules that take them."""
    recompute: int | Numbers = 0
    """0: keep all activations; 1: recompute them; k: those of every k-th block of a stage. A list: one per stage."""
    tied: dict[str, Numbers] = Field(default_factory=dict)
    """Which stages hold each tied weight; a built-in model that ties weights needs no entry."""
    communication: Means = "native"
    """How gradients are summed over replicas: by the library, or spelled out in messages; "auto": by their size."""
    latency_s: float = Field(default=20e-6, ge=0)
    """Seconds that a message costs, which communication "auto" reckons with."""
    bandwidth: float = Field(default=1e9, gt=0)
    """Bytes per second between two ranks, likewise."""
    zero: int = Field(default=0, ge=0, le=3)
    """What is sharded over replicas instead of each holding all of it: 1 the optimizer's state, 2 gradients too, 3
    weights too; 0: nothing."""
    zero_every: int = Field(default=1, ge=1)
    """With `zero` 2 or 3: after how many microbatches of a stage its gradients are reduced."""
    plan: str | None = None
    """A plan file; it takes the place of the other settings of this section."""
    context: ContextMethod = "ring"
    """How attention reaches over the slices of a sequence, where the mesh has cp."""
    rules: dict[str, TensorSplitName] = Field(default_factory=dict)
    """Which layers tp cuts, and how, beyond the usual ones: {"*.attention.q": column, "4.head": replicate}; names are
    those in the whole model, which begin with the number of a block."""
    sequence_parallel: bool = False
    """Whether each rank of tp has a slice of the tokens wherever layers are not cut."""
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
    trace: str | None = None
    """A directory to write down in when each instruction ran, for `render --trace`; none: nothing is written."""
    trace_first: int = Field(default=2, ge=0)
    """The first step that is traced, counted from 0."""
    trace_steps: int = Field(default=8, ge=1)
    """How many steps are traced."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Seconds without progress after which a run counts as stalled."""


class CheckpointConfig(Settings):
    """The section `checkpoint`: what survives the run."""

    dir: str | None = None
    """Directory of the checkpoints; none: nothing is saved."""
    every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0: one at the end of each epoch."""
    keep: int = Field(default=2, ge=1)
    """How many of the latest checkpoints stay."""


class LogConfig(Settings):
    """The section `log`: what is written down."""

    path: str | None = None
    """A file of JSON lines; none: no file."""
    every: int = Field(default=50, ge=1)
    """Steps between two lines."""


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
