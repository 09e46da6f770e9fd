"""Dependence of optimizers' updates on other numbers: declared by the class; for torch's own, by one table.

    Coupling.NONE      on that number's own gradients: SGD, Adam          any shard of a parameter can be stepped
    Coupling.WITHIN    on its whole parameter: Muon, Adafactor, LAMB      the parameter has to be whole
    Coupling.NORM      on the norm of all gradients, by which it clips    it has to be given the rest of that norm
    Coupling.ACROSS    on other parameters in another way: Prodigy        all parameters have to be on one rank

    class Lamb(Optimizer):
        needs_whole_parameters = True        False: each number is stepped by its own gradients alone
        needs_gradient_norm = True           where it clips by the norm of all gradients

A class without these attributes may depend on anything (None), and so may an optimizer with step hooks (its own, or
those of all optimizers), unless it has them itself: `optimizer.needs_whole_parameters = False`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from enum import IntFlag
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from quintsched.errors import UsageError

from ..user_objects.library_or_user import arguments_of, globals_of


class Coupling(IntFlag):
    """Dependence of a number's update on more than its own gradients."""

    NONE = 0
    WITHIN = 1
    NORM = 2
    ACROSS = 4


_ELEMENTWISE = "SGD Adam AdamW NAdam RAdam Adamax RMSprop Adagrad Adadelta ASGD Rprop"
_WHOLE = "Adafactor Muon"

COUPLING_BY_CLASS: dict[type[Optimizer], Coupling] = {
    getattr(torch.optim, name): coupling
    for names, coupling in ((_ELEMENTWISE, Coupling.NONE), (_WHOLE, Coupling.WITHIN))
    for name in names.split()
    if hasattr(torch.optim, name)
}
"""Coupling of torch's own optimizers."""

OURS = "quintsched"
"""Key, among the hooks of all optimizers, of the engine's own, which changes nothing."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an object, through mappings, sequences and optimizers."""
    waiting, seen = [value], set[int]()
    while waiting:
        found = waiting.pop()
        if isinstance(found, Tensor):
            yield found
        elif id(found) not in seen and isinstance(found, Mapping | list | tuple | set | Optimizer):
            seen.add(id(found))
            found = vars(found) if isinstance(found, Optimizer) else found
            waiting += found.values() if isinstance(found, Mapping) else found


def require_steppable(optimizer: Optimizer) -> None:
    """Raise `UsageError` for an optimizer that the engine cannot step, whatever the mesh."""
    kind = type(optimizer)
    closure = arguments_of(kind.step).get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is closure.empty):
        raise UsageError(
            f"{kind.__name__} computes losses inside its step, by a closure; the engine's step is one forward and one "
            "backward: use an optimizer that takes gradients, such as torch.optim.AdamW"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError(
            "SparseAdam wants sparse gradients, and the engine adds all gradients up in dense buckets; use "
            "torch.optim.Adam, with nn.Embedding(sparse=False)"
        )


def require_free_hooks(optimizer: Optimizer) -> None:
    """Raise `UsageError` for step hooks that hold parameters themselves: ranks step shards in their place."""
    for hook in hooks_of(optimizer):
        if hook is vars(optimizer).get("step"):
            raise UsageError(
                f"{type(optimizer).__name__}.step is replaced on the optimizer itself, but each rank steps one over "
                "its own parameters; write a class that overrides step, and says needs_whole_parameters, or a step hook"
            )
        cells = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
        reached = [*cells, *getattr(hook, "args", ()), getattr(hook, "__self__", None), getattr(hook, "keywords", {})]
        code = getattr(hook, "__code__", None)
        named = [] if code is None else [hook.__globals__.get(name) for name in globals_of(code)]
        if (
            any(isinstance(found, nn.Module) for found in [*reached, *named])
            or any(isinstance(tensor, nn.Parameter) for tensor in tensors_in(named))
            or next(tensors_in(reached), None) is not None
        ):
            raise UsageError(
                f"a step hook of {type(optimizer).__name__} has parameters or modules by itself, but a rank steps its "
                "share of them; let the hook take what it works on from the optimizer that it is given: lambda "
                "optimizer, args, kwargs: …(optimizer.param_groups)"
            )


def kind_of(optimizer: Optimizer) -> str:
    """Return its class name, and whether it has step hooks, in words."""
    return f"{type(optimizer).__name__}{' with its step hooks' if hooks_of(optimizer) else ''}"


def hooks_of(optimizer: Optimizer) -> list[Any]:
    """Return its step hooks, those of all optimizers, and a step that was set on it, but for a rate scheduler's."""
    step = None if hasattr(optimizer.step, "_wrapped_by_lr_sched") else vars(optimizer).get("step")
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return [
        *(hook for key, hook in _global_optimizer_pre_hooks.items() if str(key) != OURS),
        *(*before.values(), *after.values(), *_global_optimizer_post_hooks.values()),
        *([step] if step else []),
    ]


def coupling_of(optimizer: Optimizer) -> Coupling | None:
    """Return the coupling of its updates, step hooks included; None: unknown."""
    said = getattr(optimizer, "needs_whole_parameters", None)
    if said is None:
        return None if hooks_of(optimizer) else coupling_of_class(type(optimizer))
    needs_norm = getattr(optimizer, "needs_gradient_norm", False)
    return (Coupling.WITHIN if said else Coupling.NONE) | (Coupling.NORM if needs_norm else Coupling.NONE)


def coupling_of_class(kind: type[Optimizer]) -> Coupling | None:
    """Return the coupling of a class, if it is one of torch's or inherits its step unchanged; None: unknown."""
    known = next((base for base in kind.__mro__ if base in COUPLING_BY_CLASS), None)
    if known is None:
        return None
    bases = known.__mro__[: known.__mro__.index(Optimizer)]
    methods = {name for base in bases for name, value in vars(base).items() if inspect.isfunction(value)} - {"__init__"}
    alike = (inspect.unwrap(getattr(kind, name)) is inspect.unwrap(getattr(known, name)) for name in methods)
    return COUPLING_BY_CLASS[known] if all(alike) else None
