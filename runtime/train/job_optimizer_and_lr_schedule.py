"""Optimizers and learning-rate schedules of a job file: torch's classes or a user's, and factors as a pure function."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quintsched.errors import UsageError, suggest
from quintsched.import_user_code import call_function, is_user_object, load_object

from ..engine import Engine
from ..settings.optimizer_settings import OPTIMIZERS, LearningRateConfig, OptimizerConfig, names_code
from ..user_objects.library_or_user import arguments_of

LR_FACTOR = "lr_factor"
"""The key of a parameter group under which stands by how much its learning rate is larger than the optimizer's."""

LearningRateShape = Callable[[float, LearningRateConfig], float]

_SHAPES: Mapping[str, LearningRateShape] = {
    "constant": lambda progress, schedule: 1.0,
    "linear": lambda progress, schedule: 1.0 - progress,
    "cosine": lambda progress, schedule: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "polynomial": lambda progress, schedule: math.pow(1.0 - progress, schedule.power),
}
"""By name: the height, from 1 to 0, after a fraction of the decay."""

Params = Iterable[nn.Parameter] | Iterable[tuple[str, Tensor]]


def classes() -> dict[str, type[Optimizer]]:
    """Return the classes of torch.optim by their names in small letters."""
    found = {name.lower(): getattr(torch.optim, name) for name in dir(torch.optim)}
    return {name: found[name] for name in OPTIMIZERS if isinstance(found.get(name), type)}


def build_optimizer(config: OptimizerConfig, params: Params, undecayed: Collection[str] = ()) -> Optimizer:
    """Return an optimizer over `params`, plain or named, updating all of them in few kernels where it can (`foreach`).

    Weight decay spares the named parameters in `undecayed`; groups are those of `config.groups`.

    Raises:
        UsageError: a class that does not exist, or does not take its options; one of torch's that refuses a value, or
            a parameter (Muon takes matrices alone).
    """
    kind = _load(config.name) if names_code(config.name) else classes().get(config.name)
    if kind is None:
        raise UsageError(f"train.optimizer.name: torch {torch.__version__} has no {config.name!r}")
    if not callable(kind):
        raise UsageError(f"train.optimizer.name: {config.name} is a {type(kind).__name__}, not a class")
    options = {"lr": config.lr, **config.options}
    options |= {name: getattr(config, name) for name in ("betas", "momentum") if name in config.model_fields_set}
    if "weight_decay" in config.model_fields_set or config.name in ("sgd", "adam", "adamw"):
        options["weight_decay"] = config.weight_decay
    known, takes_any = _arguments_of(kind)
    if "foreach" in known:
        options.setdefault("foreach", True)
    _require_known(config, options, known, takes_any=takes_any)
    try:
        made: Optimizer = kind(_groups(config, params, undecayed), **options)
    except (TypeError, ValueError) as error:
        raise (error if names_code(config.name) else UsageError(f"train.optimizer: {config.name}: {error}")) from None
    return made


def _load(name: str) -> Any:
    """Return the object of "my_file.py:name", or of "package.module:name"; raises `UsageError`."""
    if is_user_object(name) or ":" not in name:
        return load_object(name)
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{name}: {error}") from None


def _arguments_of(kind: Callable[..., Any]) -> tuple[list[str], bool]:
    """Return the names of the arguments of a class behind its parameters, and whether it takes any others."""
    _, *arguments = arguments_of(kind).values()
    named = [one.name for one in arguments if one.kind is not one.VAR_KEYWORD]
    return named, len(named) < len(arguments)


def _require_known(
    config: OptimizerConfig, options: Mapping[str, Any], known: Collection[str], *, takes_any: bool
) -> None:
    of_groups = [(f"groups.{k}.options", name) for k, group in enumerate(config.groups) for name in group.options]
    for where, name in [*(("options", name) for name in options), *of_groups]:
        if name not in known and not takes_any:
            raise UsageError(f"train.optimizer.{where}: {config.name} takes no {name!r}{suggest(name, known)}")


def _groups(config: OptimizerConfig, params: Params, undecayed: Collection[str]) -> list[dict[str, Any]]:
    """Return parameter groups as torch takes them: those of the settings, then the others; none is empty."""
    given = list(params)
    of_each: list[list[Any]] = [[] for _ in config.groups]
    others: list[Any] = []
    for param in given:
        name = param[0] if isinstance(param, tuple) else ""
        matching = (k for k, group in enumerate(config.groups) if any(fnmatchcase(name, p) for p in group.params))
        place = next(matching, None)
        (others if place is None else of_each[place]).append(param)
    spared = [param for param in others if isinstance(param, tuple) and param[0] in undecayed]
    decayed = [param for param in others if not isinstance(param, tuple) or param[0] not in undecayed]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    for group, params_of_group in zip(config.groups, of_each, strict=True):
        own = {"params": params_of_group, **group.options}
        if group.weight_decay is not None:
            own["weight_decay"] = group.weight_decay
        if group.lr is not None:
            own |= {"lr": group.lr, LR_FACTOR: group.lr / config.lr if config.lr else 0.0}
        groups.append(own)
    return [group for group in groups if group["params"]]


def require_group_names(config: OptimizerConfig, engine: Engine) -> None:
    """Raise `UsageError` for a pattern of a parameter group that no parameter of the model has (collective)."""
    names = [
        f"{number}.{name}"
        for stage in engine.stages.values()
        for number, block in stage.blocks.items()
        for name, _ in block.named_parameters()
    ]
    patterns = [(k, pattern) for k, group in enumerate(config.groups) for pattern in group.params]
    found = engine.everyone.add_numbers(*(any(fnmatchcase(name, pattern) for name in names) for _, pattern in patterns))
    for (k, pattern), matches in zip(patterns, found, strict=True):
        if not matches:
            raise UsageError(
                f"train.optimizer.groups.{k}.params: no parameter of the model is called {pattern!r}; there is, for "
                f"example: {', '.join(names[:8])}"
            )


def set_learning_rate(optimizers: Iterable[Optimizer], rate: float) -> None:
    """Set the learning rate of all groups that have one, each by its own factor."""
    for group in _groups_with_rates(optimizers):
        group["lr"] = rate * group.get(LR_FACTOR, 1.0)


def keep_own_rates(optimizers: Iterable[Optimizer]) -> None:
    """Let the learning rates that groups were built with be those that a schedule multiplies."""
    for group in _groups_with_rates(optimizers):
        group.setdefault(LR_FACTOR, group["lr"])


def _groups_with_rates(optimizers: Iterable[Optimizer]) -> Iterator[dict[str, Any]]:
    return (group for optimizer in optimizers for group in optimizer.param_groups if "lr" in group)


def learning_rate_factor(schedule: LearningRateConfig, step: int, total_steps: int) -> float:
    """Return the factor of the learning rate in `step` (from 0) of `total_steps`.

    It rises over `warmup_steps`, reaching 1 in the last of them, and then stays, or falls to `min_factor` = m, which
    the step after the last one would have; p is the fraction of the way down, from 0 to 1:

        1 ┤   ╭──╮            cosine        m + (1 - m) (1 + cos πp) / 2
          │  ╱    ╲           linear        m + (1 - m) (1 - p)
          │ ╱      ╲__ m      polynomial    m + (1 - m) (1 - p)^power
          └─┴──┴──────┴▶      exponential   m^p; inverse_sqrt: max(m, sqrt(w / (step + 1))), w the warm-up, at least 1
            warmup    total   wsd           1, then linear over the last `decay_steps`      Hu et al. 2024, MiniCPM

    Raises `UsageError` for a user's function that does not give a number.
    """
    if names_code(schedule.name):
        return _own_factor(schedule.name, step, total_steps)
    warmup = schedule.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    least, fall = schedule.min_factor, max(1, total_steps - warmup)
    if schedule.name == "inverse_sqrt":
        return max(least, math.sqrt(max(warmup, 1) / (step + 1)))
    if schedule.name == "wsd":
        decay = min(schedule.decay_steps or max(total_steps // 10, 1), fall)
        return least + (1 - least) * (1.0 - min(1.0, max(0.0, (step - (total_steps - decay)) / decay)))
    progress = min(1.0, (step - warmup) / fall)
    if schedule.name == "exponential":
        return math.pow(max(least, 1e-8), progress)
    height: float = _SHAPES[schedule.name](progress, schedule)
    return least + (1 - least) * height


def _own_factor(name: str, step: int, total_steps: int) -> float:
    found = call_function(f"train.lr_schedule.name: {name}", _load(name), step, total_steps)
    if not isinstance(found, int | float) or not math.isfinite(found):
        raise UsageError(f"train.lr_schedule.name: {name} gives {found!r} in step {step}, not a number")
    return float(found)
