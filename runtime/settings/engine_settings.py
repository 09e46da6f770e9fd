"""Settings of an engine, beside plan, blocks, loss and optimizer, as frozen objects.

    Engine(plan, blocks, loss_fn, optimizer, clip=1.0)  ┐                            compared between ranks
    train: {clip: 1.0}                                  ┼──▶  RunSettings.clip  ──▶  stored in checkpoints
    --set train.clip=1.0                                ┘                            used by steps

A setting is one field: its type, its default, its description, and its place in a job file (`InJob`). All else derives
from that: arguments of `Engine` and their documentation, sections of the job file, comparisons of ranks, and which
settings a resumed run must keep (`SettingRule`).

Validation of user input: frozen, strict, and every fault reported in one line with its place.

A settings class documents each field by the string below it. `read_settings` converts a mapping from a file or a
command line:

    {"optimizr": {…}, "epochs": "two"}  ─▶  UsageError   train.optimizr: unknown key; did you mean 'optimizer'?
                                                         train.epochs: input should be a valid integer, not 'two'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from inspect import Parameter, Signature, signature
from itertools import chain
from textwrap import wrap
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from quintsched.errors import UsageError, printable, suggest
from quintsched.files.strictjson import shorten
from quintsched.files.user_records import RecordMetaclass

from .allowed_setting_values import BufferChoice, ContextMethod, LossOver, Precision, Proofs, ZeroSplit
from .job_keys_of_other_frameworks import find_foreign_key
from .tensor_parallel_rules import read_rule


class Settings(BaseModel, metaclass=RecordMetaclass):
    """Base of all settings: frozen, no unknown keys, no silent conversions, no NaN."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


MOST_FAULTS, MOST_LETTERS = 10, 400
"""Limits of a message: number of faults, and letters of each."""

AnySettings = TypeVar("AnySettings", bound=Settings)


def read_settings(kind: type[AnySettings], values: Mapping[str, Any], source: str, prefix: str = "") -> AnySettings:
    """Return `values` as a checked `kind`.

    `source` names where the values came from ("": not said), `prefix` is the path before each key ("model.options").
    Raises UsageError that lists every fault.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
        faults = [_fault(kind, one, prefix) for one in details[:MOST_FAULTS]]
        faults += [f"and {len(details) - MOST_FAULTS} more"] if len(details) > MOST_FAULTS else []
        raise UsageError("\n  ".join([*([f"{source}:"] if source else []), *faults])) from None


def _fault(kind: type[Settings], details: ErrorDetails, prefix: str) -> str:
    """Return one fault as "path: description"."""
    place = details["loc"]
    path = ".".join(shorten(str(key)) for key in ([prefix] if prefix else []) + list(place))
    words = f"{path}: {_reason(kind, details)}"
    return printable(words if len(words) <= MOST_LETTERS else f"{words[:MOST_LETTERS]}…")


def _reason(kind: type[Settings], details: ErrorDetails) -> str:
    """Return the description of a fault, without the place."""
    value, message = details["input"], details["msg"]
    match details["type"]:
        case "extra_forbidden":
            *section, key = details["loc"]
            return "unknown key" + _nearest_key(kind, section, str(key))
        case "missing":
            return "is required"
        case "model_type":
            return f"is a section of settings (key: value), not {_short(value)}"
        case "tuple_type" if item := _section_at(kind, details["loc"]):
            keys = ", ".join(f"{name}: …" for name, field in item.model_fields.items() if field.is_required())
            return f"is a list: [{{{keys}}}, …], not {_short(value)}"
        case "int_type" if isinstance(value, float) and value.is_integer():
            return f"is a whole number; write {int(value)}"
        case "literal_error" if isinstance(value, str):
            return f"there is no {_short(value)}" + suggest(value, re.findall(r"'([^']*)'", details["ctx"]["expected"]))
        case "value_error":
            return message.removeprefix("Value error, ")
    return f"{message[:1].lower()}{message[1:]}, not {_short(value)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _section_at(kind: type[Settings], path: Sequence[int | str]) -> type[Settings] | None:
    """Return the settings class of the section at `path` below `kind`, or of the items of a list there."""
    found: type[Settings] | None = kind
    for key in path:
        if found is not None and isinstance(key, str):
            found = _settings_in(found.model_fields[key].annotation) if key in found.model_fields else None
    return found


def _settings_in(annotation: Any) -> type[Settings] | None:
    """Return the settings class within a type: `Part` of `tuple[Part, ...]` and of `Part | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return annotation
    return next(filter(None, map(_settings_in, get_args(annotation))), None)


def _nearest_key(root: type[Settings], path: Sequence[int | str], key: str) -> str:
    """Suggest the intended key: the same name a level below the section at `path`, what another framework calls so,
    the same name elsewhere below `root`, or the nearest of the section."""
    section = _section_at(root, path) or root
    below = [
        ".".join(map(str, (*path, name, key)))
        for name, field in section.model_fields.items()
        if key in getattr(field.annotation, "model_fields", {})
    ]
    if below:
        return suggest(below[0], below)
    return _foreign_key(root, key) or _key_elsewhere(root, key) or suggest(key, section.model_fields, closeness=0.7)


def _foreign_key(root: type[Settings], key: str) -> str:
    """Suggest our key for one of another framework, with its value; "" for other keys."""
    foreign = find_foreign_key(key)
    if foreign is None:
        return ""
    ours, value = foreign.ours, f" ({foreign.value})" if foreign.value else ""
    if root is RunSettings:  # arguments of `Engine`, which has some of a job's settings
        arguments = {f"{place.section}.{name}": argument for argument, name, place in places()}
        ours, value = arguments.get(ours, ""), ""
    elif ".options." in ours and "model" not in root.model_fields:  # the options of one model, or of one data set
        ours = ours if ours.rpartition(".")[2] in root.model_fields else ""
    return f"; did you mean {ours!r}{value}?" if ours else ""


def _key_elsewhere(root: type[Settings], key: str) -> str:
    """Suggest the key of this name in another section, where there is exactly one."""
    found = [path for path in _keys(root) if path.rpartition(".")[2] == key]
    return f"; did you mean {found[0]!r}?" if len(found) == 1 else ""


def _keys(kind: type[Settings], prefix: str = "") -> Iterator[str]:
    """Yield the full names of all settings below `kind`."""
    for name, field in kind.model_fields.items():
        yield f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            yield from _keys(field.annotation, f"{prefix}{name}.")


Names = Annotated[tuple[str, ...], Field(strict=False)]
Ties = dict[str, Names]
PositiveSeconds = Annotated[float, Field(gt=0)]


def _rule_data(value: Any) -> Any:
    read_rule(value)
    return value


TensorRuleData = Annotated[str | dict[str, Any], PlainValidator(_rule_data)]
"""A rule as users write it; see `tensor_parallel_rules`."""


class SettingRule(Enum):
    """Constraint on a setting, or on a section, when ranks compare theirs and when a run is resumed."""

    KEPT = "a run goes on with the same"
    FREE = "a run may go on with another, whatever holds for its section"
    OPEN = "a section without a fixed set of settings: one that is not there differs from one that is"
    OF_A_MACHINE = "ranks may have others: paths, and what one rank alone uses"
    CODE = 'may name code of the user\'s, "my_file.py:name"'
    TRAINS = "means something to a training alone"
    GIVEN = "means something else where it is given than where it has the same value by default"


@dataclass(frozen=True)
class InJob:
    """Place of a setting in a job file.

    Attributes:
        section: its section.
        key: its key there; "": that of the argument.
        kind, default: type and default in a job file, where they differ.
        load: converts that to the engine's value.
    """

    section: str
    key: str = ""
    kind: Any = None
    default: Any = None
    load: Callable[[Any], Any] = lambda value: value


def _no_half(name: object) -> object:
    if str(name).removeprefix("torch.") in ("fp16", "float16", "half", "16", "16-mixed", "16-true"):
        raise ValueError(
            f"{name!r} needs a loss scale, which Engine(…, grad_scaler=torch.amp.GradScaler()) takes, and no job; "
            "in a job give 'bfloat16' or 'float32'"
        )
    return name


def _dtype(name: str) -> Any:
    return getattr(import_module("torch"), name)


def _seconds_or_auto(value: object) -> object:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value != "auto" and not (is_number and value > 0):  # type: ignore[operator]
        raise ValueError(f'{value!r} is no number of seconds above 0, and not "auto"')
    return value


_SECONDS_OR_AUTO = BeforeValidator(_seconds_or_auto)


def _seconds(value: float | str) -> float | None:
    return None if isinstance(value, str) else value


class RunSettings(Settings):
    """Settings of an engine; the arguments of `Engine` with these names."""

    loss_over: Annotated[LossOver | None, SettingRule.TRAINS, InJob("train")] = None
    """Reduction of a loss that is one number: "samples", "targets" (those that are not -100), "sum", "microbatch":
    a value of each microbatch by itself; none: it is tested, and refused where microbatches cannot make it up."""
    clip: Annotated[float | None, SettingRule.TRAINS, InJob("train")] = Field(default=None, gt=0)
    """The largest global norm of the gradient; longer ones are scaled down to it."""
    bucket_mb: Annotated[float, SettingRule.TRAINS, InJob("parallel")] = Field(default=25.0, gt=0)
    """Size in MB (10^6 bytes) above which a gradient bucket is reduced in several reductions."""
    dtype: Annotated[
        Any,
        SettingRule.KEPT,
        SettingRule.GIVEN,
        InJob("runtime", "precision", Annotated[Precision, BeforeValidator(_no_half)], "float32", _dtype),
    ] = None
    """Dtype to compute in, of weights and inputs; None, of an engine: as blocks are built. With bfloat16 and float16,
    gradients are accumulated and weights are stepped in float32."""
    context: Annotated[ContextMethod, InJob("parallel")] = "ring"
    """Method of attention over the slices of a sequence, where the mesh has cp."""
    rules: Annotated[dict[str, TensorRuleData], InJob("parallel")] = Field(default_factory=dict)
    """Layers that tp cuts, and how, beyond the usual ones: {"*.attention.q": "column", "4.head": "replicate"}; names
    are those in the whole model, which begin with the number of a block. {"cut": "column", "parts": 3} declares the
    fused blocks of the outputs."""
    prove: Annotated[Proofs, InJob("parallel")] = "foreign"
    """Blocks that run once before the first step, sharded beside whole: all but built-in ones, "all", or "none"."""
    buffers: Annotated[BufferChoice, SettingRule.KEPT, InJob("parallel")] = "merge"
    """Handling, by replicas, of buffers that a forward changes: "merge" running statistics, to those of one
    process over all microbatches; "sync" batch norms in every forward; take those of the "first"; or "refuse"."""
    sequence_parallel: Annotated[bool, SettingRule.GIVEN, InJob("parallel")] = False
    """Whether each rank of tp has a slice of the tokens wherever layers are not cut."""
    tied: Annotated[Ties | None, SettingRule.OPEN, InJob("model", "", Ties, {})] = None
    """Tied weights of a user's model: {embedding: ["0.weight", "5.weight"]}; the plan ties the same names; see
    `parallel.tied`."""
    compiled: Annotated[bool, InJob("runtime", "compile")] = False
    """Whether torch.compile compiles each stage (excluding collectives, sharded or deferred matrix products, and blocks
    that draw random numbers other than by nn.Dropout)."""
    cuda_graph: Annotated[bool, SettingRule.TRAINS, InJob("runtime")] = False
    """Whether steps run from CUDA graphs, one for each shape of a batch: on one GPU, for models without dropout."""
    zero_split: Annotated[ZeroSplit, SettingRule.TRAINS, InJob("parallel")] = "auto"
    """Partition of parameters by ZeRO: equal segments ("element"), or whole ones ("parameter"); "auto": these, but for
    torch's own optimizers that step each number by its own gradients alone."""
    max_skipped: Annotated[int, SettingRule.FREE, SettingRule.TRAINS, InJob("train")] = Field(default=5, ge=0)
    """Consecutive skipped steps, of a gradient that is not finite, after which the run stops and reports where that
    arose; 0: it never does."""
    verify: Annotated[bool, InJob("runtime")] = False
    """Whether messages carry a checksum that is checked, and ranks compare each collective before they begin it."""
    seed: Annotated[int, InJob("train")] = Field(default=0, ge=0, lt=2**63)
    """Seed of the initial weights, random draws, and the order of the samples."""
    timeout_s: Annotated[float, InJob("runtime")] = Field(default=300.0, gt=0)
    """The longest that one wait for other ranks may take, in seconds; with `compile` at least half an hour."""
    stall_after: Annotated[
        PositiveSeconds | None,
        InJob("runtime", "", Annotated[PositiveSeconds | Literal["auto"], _SECONDS_OR_AUTO], "auto", _seconds),
    ] = None
    """Seconds without progress after which a step counts as stalled; by default estimated from earlier steps, at least
    ten (300 with `compile`). A first step may take a minute at least; set-up, loading and saving, `timeout_s`."""

    @classmethod
    def of_arguments(cls, given: Mapping[str, Any], taker: str = "Engine", *, trains: bool = True) -> RunSettings:
        """Return the settings that arguments of a class give, which `trains` or not; raises `UsageError`."""
        if unused := sorted(given.keys() & (fields_of(cls).keys() - fields_of(cls, trains=trains).keys())):
            raise UsageError(f"{taker}: {unused[0]} is a setting of training, which this does not; leave it out")
        return read_settings(cls, given, taker)

    @classmethod
    def of_job(cls, job: Settings) -> RunSettings:
        """Return the settings in a job."""
        return cls(**{name: place.load(getattr(getattr(job, place.section), key)) for name, key, place in places()})

    def of_forward(self) -> dict[str, Any]:
        """Return those that mean something where nothing is trained."""
        return {name: getattr(self, name) for name in fields_of(type(self), trains=False)}


def fields_of(kind: type[RunSettings], *, trains: bool = True) -> dict[str, FieldInfo]:
    """Return the fields of an engine's settings, by name; without `trains`, those that do not need a training."""
    return {n: field for n, field in kind.model_fields.items() if trains or SettingRule.TRAINS not in field.metadata}


def places() -> Iterator[tuple[str, str, InJob]]:
    """Yield each setting's name, its key in a job file, and its place there."""
    for name, field in RunSettings.model_fields.items():
        place = next(found for found in field.metadata if isinstance(found, InJob))
        yield name, place.key or name, place


def fields_in(section: str) -> dict[str, Any]:
    """Return the fields of these settings in a section of a job file, as pydantic makes models of them."""
    found: dict[str, Any] = {}
    for name, key, place in places():
        field = RunSettings.model_fields[name]
        if place.section == section and place.kind is None:
            found[key] = field.annotation, field
        elif place.section == section:
            written = Field(default=place.default, description=field.description)
            found[key] = Annotated[place.kind, *field.metadata], written
    return found


Taking = TypeVar("Taking")


def taking_settings(kind: type[Taking], *, trains: bool = True) -> type[Taking]:
    """Give a class that takes settings by name them as arguments, and their words for `{settings}` of its docstring.

    Without `trains`, those that do not need a training.
    """
    fields = fields_of(RunSettings, trains=trains)
    words = (
        wrap(f"{name}: {' '.join((field.description or '').split())}", 108, subsequent_indent="    ")
        for name, field in fields.items()
    )
    kind.__doc__ = (kind.__doc__ or "").replace("{settings}", "\n            ".join(chain.from_iterable(words)))
    init: Any = vars(kind)["__init__"]
    own = [one for one in signature(init).parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
    named = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=field.get_default(call_default_factory=True))
        for name, field in fields.items()
    ]
    init.__signature__ = Signature([*own, *named])
    return kind
