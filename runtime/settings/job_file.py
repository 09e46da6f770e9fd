"""Job file: every setting of a run, apart from the plan.

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

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, create_model, model_validator

from quintsched.check_call_arguments import PATH, SEVERAL, takes
from quintsched.errors import InputError, UsageError
from quintsched.files.atomic import read_whole
from quintsched.files.strictjson import shorten
from quintsched.files.strictyaml import MOST_BYTES, parse_yaml
from quintsched.request import CompileRequest, RequestOption, entries

from .allowed_setting_values import StrictRules, TransportName
from .engine_settings import Names, RunSettings, SettingRule, Settings, fields_in, read_settings
from .intervals import Every, EveryOrEpoch
from .optimizer_settings import LearningRateConfig as LearningRateConfig
from .optimizer_settings import OptimizerConfig as OptimizerConfig
from .output_paths import URL, PathText, PlaceText
from .sections_read_with_model_and_data import SourcedSection, source_of

Axis = Literal["dp", "pp", "tp", "cp", "ep"]
Samples = Literal["validation", "train"]
AxisSizes = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...],
    BeforeValidator(lambda given: (given,) if isinstance(given, int) else given),
    Field(strict=False, min_length=1),
]

_UNSAID: dict[str, Any] = {"mesh": "dp=1", "schedule": "1f1b", "microbatches": 1}
"""Defaults of a job for the required arguments of `compile`."""

_PLAN_MARKS = {"costs": (SettingRule.OF_A_MACHINE,), "schedule": (SettingRule.CODE,)}
_TYPES: dict[type, dict[str, Any]] = {int: {"type": "integer"}, float: {"type": "number"}, bool: {"type": "boolean"}}


def _schema_of(entry: RequestOption) -> dict[str, Any]:
    """Return the JSON Schema of a setting of the plan."""
    text: dict[str, Any] = {"type": "string"}
    stages: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
    setting = entry.setting
    if entry.name == "mesh":
        kinds = [text, {"type": "object", "additionalProperties": {"type": "integer"}}]
    elif entry.name == "recompute_microbatches":
        kinds = [text, stages, {"type": "array", "items": stages}]
    elif setting.text is list:
        kinds = [{"type": "object", "additionalProperties": {"anyOf": [stages, {"type": "integer"}]}}]
    elif setting.text is str and setting.parse is not None:
        kinds = [stages] if entry.default is None else [{"type": "integer"}, stages]
    else:
        kinds = [_TYPES[type(entry.default)] if entry.part_of else _TYPES.get(setting.text, text)]
    kinds += [{"type": "null"}] if entry.default is None else []
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def _plan_field(entry: RequestOption) -> tuple[str, Any]:
    """Return a pydantic field for a setting of the plan in a job file: its name, with its type and its field."""

    def check(value: Any) -> Any:
        try:
            return value if value is None and entry.default is None else entry.check(value)
        except UsageError as error:
            raise ValueError(str(error)) from None

    default, marks = _UNSAID.get(entry.name, entry.default), (SettingRule.GIVEN, *_PLAN_MARKS.get(entry.name, ()))
    words = f"{entry.doc[0].upper()}{entry.doc[1:]}"
    field = Field(default=default, description=words, json_schema_extra=_schema_of(entry))
    return entry.name, (Annotated[Any, PlainValidator(check), *marks], field)


def _section(name: str, fields: dict[str, Any] | None = None) -> Any:
    """Return the base class of a section: the engine's settings in it, and further `fields`."""
    bare, given = {"use_attribute_docstrings": False}, {**(fields or {}), **fields_in(name)}  # it has no source
    made = create_model(f"{name.title()}Settings", __base__=Settings, __cls_kwargs__=bare, **given)
    made.model_config = Settings.model_config
    return made


class ModelConfig(SourcedSection, _section("model")):  # type: ignore[misc]
    """Section `model`: the model to train."""

    name: Annotated[str, SettingRule.CODE] = "vit"
    """A built-in model, or a user's function, "my_file.py:build", which returns blocks, or a model to be split. It is
    called with the options by name, and with `data`, the sizes of the data (a `DataSpec`), if it takes that."""
    options: Annotated[dict[str, Any], SettingRule.OPEN] = Field(default_factory=dict)
    """Options of that model."""
    pretrained: Annotated[str | None, SettingRule.FREE, SettingRule.OF_A_MACHINE] = None
    """Weights to start from: a safetensors file, or a directory with `model.safetensors` or its index, under the names
    of the split model, in GPT-2's shape for "gpt" with `activation: gelu_tanh`, or under ours. A resumed run
    does not read them."""
    fresh: Annotated[Names, SettingRule.FREE] = ()
    """Patterns on names of weights that `pretrained` need not have: they keep their initial values."""
    strict: Annotated[bool, SettingRule.FREE] = True
    """Whether tensors of `pretrained` that no weight takes are an error."""


class DataConfig(SourcedSection):
    """Section `data`: the training data."""

    name: Annotated[str, SettingRule.CODE] = "digits"
    """"digits" (scikit-learn's), "mnist" (the IDX files in `path`), "text" (the bytes of a file), "tokens" (token
    shards, as `quintsched data tokenize` writes them), or a user's function: "my_file.py:load", which returns a
    data set of torch, a pair of them for training and validation, or loaders."""
    path: Annotated[str | None, SettingRule.FREE, SettingRule.OF_A_MACHINE] = None
    """A directory with MNIST's four IDX files, gzipped or not, used instead of "digits"; for "text", a file, used
    instead of the source of Python's standard library; for "tokens", a folder of token shards, or of such folders."""
    options: Annotated[dict[str, Any], SettingRule.OPEN] = Field(default_factory=dict)
    """Options of "text": {sequence: 128, max_bytes: null}; of "tokens": {sequence: 1024, pack: true, mask_documents:
    false, mixture: [], samples: null, validation: 0.01, prefetch: 4}; or of a user's function. The others have none."""


class AutoConfig(Settings):
    """Section `parallel.auto`: mesh, schedule and all that predictions cover are chosen as by `quintsched tune`."""

    world: int | None = Field(default=None, ge=1)
    """Ranks; none: as many processes as were started, or for `quintsched run` as this machine has devices, or cores."""
    hardware: str = "cpu"
    """Hardware of the ranks: a preset, a file, or "cpu": this machine, as `quintsched calibrate` has measured it."""
    axes: dict[Axis, AxisSizes] = Field(default_factory=dict)
    """Axes that are not free, and the sizes they may have: {tp: 1, pp: [2, 4]}."""


def spell_out_auto(parallel: Any) -> Any:
    """Return the section `parallel` with its short forms `parallel: auto` and `auto: true` expanded."""
    if parallel == "auto":
        return {"auto": {}}
    if isinstance(parallel, dict) and isinstance(parallel.get("auto"), bool):
        return {**parallel, "auto": {} if parallel["auto"] else None}
    return parallel


class ParallelConfig(_section("parallel", dict(map(_plan_field, entries())))):  # type: ignore[misc]
    """Section `parallel`: the plan, compiled or read from a file, and options of its execution."""

    auto: AutoConfig | None = None
    """Chooses the settings of the plan that the section leaves open; see `auto`. `parallel: auto` leaves all to it."""

    @model_validator(mode="before")
    @classmethod
    def _auto_spelled_out(cls, given: Any) -> Any:
        return spell_out_auto(given)

    @property
    def given(self) -> dict[str, Any]:
        """Settings that the job names of the plan to compile."""
        return {entry.name: getattr(self, entry.name) for entry in entries() if entry.name in self.model_fields_set}

    def request(self, **instead: Any) -> CompileRequest:
        """Return the request to compile, with some settings instead of the job's; raises `UsageError`."""
        return CompileRequest.of_data(_UNSAID | self.given | instead)

    elastic: bool = False
    """Whether the number of replicas (dp) follows the number of started processes, whatever `mesh` says."""
    plan: Annotated[str | None, SettingRule.OF_A_MACHINE] = None
    """A plan file, used instead of the settings that a plan is compiled from."""
    balance: Literal["estimated", "measured"] = "estimated"
    """Costs of blocks by which stages are balanced: estimated from weights, or measured on rank 0."""


class TrainConfig(_section("train")):  # type: ignore[misc]
    """Section `train`: the training loop."""

    epochs: Annotated[int, SettingRule.FREE, SettingRule.GIVEN] = Field(default=1, ge=1)
    """Passes over the training samples; with `max_steps` alone, as many as these need."""
    max_steps: Annotated[int | None, SettingRule.FREE] = Field(default=None, ge=1)
    """Steps after which training ends, in the middle of an epoch too; none: the end of the last epoch."""
    evaluate_every: Annotated[EveryOrEpoch, SettingRule.FREE] = 0
    """Interval between validations: 200, "5M tokens", "10 min"; 0: one at the end of each epoch. The end of the
    training always has one."""
    batch_size: int = Field(default=32, ge=1)
    """Samples per step, over all microbatches and replicas together."""
    accumulate: Annotated[int, SettingRule.FREE] = Field(default=1, ge=1)
    """Number of batches that these are divided into, whose gradients are accumulated before the optimizer steps."""
    loss: Annotated[str | None, SettingRule.CODE] = None
    """A function (output, targets) → a mean, or (sum, weight): "my_file.py:loss"; none: that of a split model,
    else cross-entropy."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer and its settings."""
    lr_schedule: LearningRateConfig = LearningRateConfig()
    """Schedule of the learning rate."""
    z_loss: float = Field(default=0.0, ge=0)
    """Factor of the z-loss, log(sum(exp(logits)))² per target, beside the cross-entropy (PaLM, section 5)."""
    patience: Annotated[int | None, SettingRule.FREE] = Field(default=None, ge=1)
    """Validations without a better loss after which training stops."""

    @property
    def most_epochs(self) -> int | None:
        """Passes over the data at most; None: `max_steps` alone ends the training."""
        return None if self.max_steps is not None and "epochs" not in self.model_fields_set else self.epochs


class RuntimeConfig(_section("runtime")):  # type: ignore[misc]
    """Section `runtime`: execution."""

    transport: TransportName = "auto"
    """Transport of messages; "auto": NCCL where each rank has a GPU, else gloo; "local": threads of one process."""
    rules: StrictRules | None = None
    """Stricter rules than the transport's, for tests: a send waits for its receive; messages in NCCL's order."""
    trace: Annotated[PathText | None, SettingRule.OF_A_MACHINE] = None
    """A directory for a trace of when each instruction ran, for `render --trace`; none: no trace."""
    trace_first: int = Field(default=2, ge=0)
    """The first step that is traced, counted from 0."""
    trace_steps: int = Field(default=8, ge=1)
    """Number of steps that are traced."""


class CheckpointConfig(Settings):
    """Section `checkpoint`: what is saved of the run."""

    dir: PlaceText | None = None
    """Directory of the checkpoints, or its URL in a bucket (s3://bucket/run); none: nothing is saved."""
    every: EveryOrEpoch = 0
    """Interval between checkpoints: 500, "50M tokens", "30 min"; 0: one at the end of each epoch."""
    keep: int = Field(default=2, ge=1)
    """Number of latest checkpoints kept."""
    background: bool = True
    """Whether checkpoints are written while training goes on; it takes the memory of a rank's state once more, on its
    host. Those of the format "dcp" never are."""
    format: Literal["native", "dcp"] = "native"
    """"native": a file per rank, for the plan that wrote it; "dcp": PyTorch's distributed format, for any mesh."""
    export: PathText | None = None
    """A directory for the trained weights, as `from_pretrained` of transformers reads them, or for PEFT's adapter of
    the model, as `PeftModel.from_pretrained` does; none: not written."""

    @property
    def folder(self) -> Path | None:
        """The directory, where there is one and it is no URL."""
        return None if self.dir is None or URL.fullmatch(self.dir) else Path(self.dir)

    @property
    def unused(self) -> str | None:
        """A line that names the settings without effect if `dir` is left out; None if there are none."""
        given = {name: getattr(self, name) for name in sorted(self.model_fields_set - {"export"})}
        if not given or "dir" in given:
            return None
        return f"nothing is saved: checkpoint.dir is not set ({', '.join(f'{k}: {v}' for k, v in given.items())})"


class ForwardConfig(Settings):
    """The section `forward`: the outputs of a run with `mode: forward`."""

    outputs: Annotated[PathText | None, SettingRule.OF_A_MACHINE] = None
    """A folder for them: an index, and files of safetensors."""
    samples: Samples = "validation"
    """Split of the data that is run forward: each sample once, in the order of the data."""
    max_file_mb: float = Field(default=1000.0, gt=0)
    """Size in MB (10^6 bytes) beyond which a replica begins a new file; a rank holds as much in memory."""


class SinkConfig(Settings):
    """One sink of metrics."""

    name: str
    """"tensorboard", "wandb", or a user's function or class: "my_file.py:sink"."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of TensorBoard's `SummaryWriter`, of `wandb.init` or of the user's class."""


class LogConfig(Settings):
    """Section `log`: the log file and further receivers."""

    path: Annotated[PathText | None, SettingRule.OF_A_MACHINE] = None
    """A file of JSON lines; none: no file."""
    every: Every = 50
    """Interval between two records: 50, "1M tokens", "30 s"."""
    peak_tflops: Annotated[float | None, SettingRule.OF_A_MACHINE] = Field(default=None, gt=0)
    """Peak of a rank's device in 10^12 FLOP/s, for MFU; none: that of a known GPU's datasheet, or of this CPU as
    `quintsched calibrate` measured it."""
    sinks: Annotated[
        tuple[
            Annotated[SinkConfig, BeforeValidator(lambda given: {"name": given} if isinstance(given, str) else given)],
            ...,
        ],
        Field(strict=False),
        SettingRule.OF_A_MACHINE,
    ] = ()
    """Receivers of metrics, each by name or as {name: wandb, options: {project: mine}}."""


class JobConfig(Settings):
    """A whole job file."""

    mode: Literal["train", "forward"] = "train"
    """Training, or one forward pass over data, whose outputs are written; see `forward`."""
    model: Annotated[ModelConfig, SettingRule.KEPT] = ModelConfig()
    """Model to train."""
    data: Annotated[DataConfig, SettingRule.KEPT] = DataConfig()
    """Training data."""
    parallel: ParallelConfig = ParallelConfig()
    """Division of the work over ranks."""
    train: Annotated[TrainConfig, SettingRule.KEPT] = TrainConfig()
    """Training loop."""
    runtime: RuntimeConfig = RuntimeConfig()
    """Execution."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    log: LogConfig = LogConfig()
    """Log."""
    forward: ForwardConfig = ForwardConfig()
    """Outputs of a forward run, with `mode: forward`."""

    @property
    def folder(self) -> Path | None:
        """Folder for reports of a failing run: beside the log, or the checkpoints."""
        return self.checkpoint.folder if self.log.path is None else Path(self.log.path).parent

    @property
    def run(self) -> RunSettings:
        """Settings of the engine."""
        return RunSettings.of_job(self)


def marked(mark: SettingRule, kind: type[Settings] = JobConfig, prefix: str = "") -> Iterator[str]:
    """Yield the full names of a job's settings, and sections, that have a mark."""
    for name, field in kind.model_fields.items():
        if mark in field.metadata:
            yield f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            yield from marked(mark, field.annotation, f"{prefix}{name}.")


@takes('load_job(path, ["train.epochs=4"])', path=PATH, overrides=SEVERAL)
def load_job(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Return the job of the YAML file at `path`, with overrides such as "train.epochs=4" applied.

    Raises UsageError that names the file and lists every fault.
    """
    values = _without_empty_sections(_read_mapping(Path(path)))
    for override in (None, *overrides):
        if override is not None:
            _put(values, override)
        if "parallel" in values:
            values["parallel"] = spell_out_auto(values["parallel"])
    job = read_settings(JobConfig, values, source := source_of(path, overrides))
    for section in (job.model, job.data):
        section.take_source(source)
    return job


def overrides_of(*sections: str, **values: Any) -> list[str]:
    """Return overrides in the form that `load_job` takes, of settings in a section or subsection."""
    return [f"{'.'.join(sections)}.{key}={json.dumps(value)}" for key, value in values.items()]


def _read_mapping(path: Path) -> dict[Any, Any]:
    """Return the file's top-level mapping; an empty file is an empty one."""
    try:
        content = read_whole(path, MOST_BYTES, "the job file")
    except InputError as error:
        raise UsageError(str(error)) from None
    values = parse_yaml(content, str(path), UsageError)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"{path}: a job file holds sections (model: …, train: …), not {shorten(repr(values))}")
    return values


def _without_empty_sections(values: dict[Any, Any]) -> dict[Any, Any]:
    """Drop sections without a setting ("train:" with every line commented out)."""
    return {key: value for key, value in values.items() if value is not None}


def _put(values: dict[Any, Any], override: str) -> None:
    """Set the value of "section.key=value" in `values`, creating missing sections."""
    path, equals, text = override.partition("=")
    *sections, key = path.strip().split(".")
    if not equals or not all([*sections, key]):
        raise UsageError(f"--set {override}: write it as section.key=value")
    for depth, section in enumerate(sections):
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise UsageError(f"--set {override}: {'.'.join(sections[: depth + 1])} is not a section")
    values[key] = parse_yaml(text, f"--set {override}", UsageError)
