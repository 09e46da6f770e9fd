"""What an optimizer's update of a number depends on: said by its class, of torch's own by one table.

    Coupling.NONE      on that number's own gradients: SGD, Adam          any shard of a parameter can be stepped
    Coupling.WITHIN    on its whole parameter: Muon, Adafactor, LAMB      the parameter has to be whole
    Coupling.NORM      on the norm of all gradients, by which it clips    it has to be given the rest of that norm
    Coupling.ACROSS    on other parameters in another way: Prodigy        all parameters have to be on one rank,
                       on its place, or on how many there are             in their order

    class Lamb(Optimizer):
        needs_whole_parameters = True        False: each number is stepped by its own gradients alone
        needs_gradient_norm = True           where it clips by the norm of all gradients

A class that says nothing may depend on anything (None). Hooks on the steps of torch's own optimizers are tried before
the first step: small gradients are stepped all together, and as ranks would have them (parts, some of the parameters,
the rest of the norm beside them); what leaves each alike tells. What the hooks keep on the host is put back.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from enum import IntFlag
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quintsched.errors import UsageError

from ..blocks.blocks import seeded
from ..objects.snapshot import Snapshot
from ..objects.user_code import globals_of
from .remake import parameters_of, remade, tensors_in
from .rest_of_norm import rest_of_norm


class Coupling(IntFlag):
    """What the update of a number depends on, beside its own gradients."""

    NONE = 0
    WITHIN = 1
    NORM = 2
    ACROSS = 4


_ELEMENTWISE = "SGD Adam AdamW NAdam RAdam Adamax RMSprop Adagrad Adadelta ASGD Rprop"
_WHOLE = "Adafactor Muon"

STEPS: dict[type[Optimizer], Coupling] = {
    getattr(torch.optim, name): coupling
    for names, coupling in ((_ELEMENTWISE, Coupling.NONE), (_WHOLE, Coupling.WITHIN))
    for name in names.split()
    if hasattr(torch.optim, name)
}
"""What the steps of torch's own optimizers depend on."""

SHAPES: tuple[tuple[int, ...], ...] = ((), (24,), (6, 4), (4, 3, 2), (4, 3, 2, 2))
"""The sizes that hooks are tried on, by the number of a parameter's dimensions."""

UPDATES, MOST_STEPS = 512, 24
"""So many updates of parameters are tried, in 3 to so many steps."""

LOUD, TOLERANCE = 1e8, 1e-9
"""How much larger every second gradient is: no threshold that clips is above that. By how much updates may differ."""


def require_steppable(optimizer: Optimizer) -> None:
    """Raise `UsageError` for an optimizer that the engine cannot step, whatever the mesh."""
    kind = type(optimizer)
    closure = inspect.signature(kind.step).parameters.get("closure")
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
    """Raise `UsageError` for hooks of steps that have parameters by themselves: ranks step others in their place."""
    for hook in hooks_of(optimizer):
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
    """Return the name of its class, and whether it has hooks of steps, in words."""
    return f"{type(optimizer).__name__}{' with its step hooks' if hooks_of(optimizer) else ''}"


def hooks_of(optimizer: Optimizer) -> list[Any]:
    """Return the hooks of an optimizer's steps."""
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def coupling_of(optimizer: Optimizer, device: torch.device) -> Coupling | None:
    """Return what updates depend on; None: nobody says. Raises `UsageError` for hooks that cannot be tried."""
    said, of_class = getattr(optimizer, "needs_whole_parameters", None), coupling_of_class(type(optimizer))
    if said is not None:
        needs_norm = getattr(optimizer, "needs_gradient_norm", False)
        return (Coupling.WITHIN if said else Coupling.NONE) | (Coupling.NORM if needs_norm else Coupling.NONE)
    if of_class is None or not hooks_of(optimizer):
        return of_class
    trial = _Trial(optimizer, device)
    weaker = (Coupling.NONE, Coupling.WITHIN, Coupling.NORM, Coupling.WITHIN | Coupling.NORM)
    fits = (coupling for coupling in weaker if of_class in coupling and trial.steps_alike(coupling))
    return next(fits, Coupling.ACROSS)


def coupling_of_class(kind: type[Optimizer]) -> Coupling | None:
    """Return what steps of a class depend on, if it is one of torch's or steps as such; None: nobody says."""
    known = next((base for base in kind.__mro__ if base in STEPS), None)
    if known is None:
        return None
    bases = known.__mro__[: known.__mro__.index(Optimizer)]
    methods = {name for base in bases for name, value in vars(base).items() if inspect.isfunction(value)} - {"__init__"}
    alike = (inspect.unwrap(getattr(kind, name)) is inspect.unwrap(getattr(known, name)) for name in methods)
    return STEPS[known] if all(alike) else None


class _Trial:
    """Steps copies of an optimizer over small parameters: all of them, or shares as ranks have them."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._sizes = [len(group["params"]) for group in optimizer.param_groups]
        self._parameters = parameters_of(optimizer)
        steps = min(max(UPDATES // len(self._parameters), 3), MOST_STEPS)
        random = torch.Generator().manual_seed(7)
        shapes = [SHAPES[min(p.dim(), 4)] for p in self._parameters]
        self._start, *self._gradients = [
            [_drawn(shape, random) * (LOUD if (step + n) % 2 else n + 1) for n, shape in enumerate(shapes)]
            for step in range(steps + 1)
        ]
        try:
            self._whole = self._updates(range(len(shapes)), slice(None), rest=False)
        except Exception as error:
            kind = type(optimizer).__name__
            raise UsageError(
                f"the step hooks of {kind} could not be tried ({type(error).__name__}: {error}); say it: "
                "optimizer.needs_whole_parameters = True, or False where each number is stepped by itself"
            ) from error

    def steps_alike(self, coupling: Coupling) -> bool:
        """Whether each number is stepped as among all where ranks have shares that fit a coupling."""
        halves = [slice(None)] if Coupling.WITHIN in coupling else [slice(0, None, 2), slice(1, None, 2)]
        for only in _shares(self._sizes):
            for part in halves:
                here = [n for n in only if len(self._whole[n][part])]
                try:
                    found = self._updates(here, part, rest=Coupling.NORM in coupling)
                except Exception:  # it raises so on a rank that has nothing of a group, too
                    return False
                for update, n in zip(found, here, strict=True):
                    expected = self._whole[n][part]
                    if not torch.allclose(update, expected, rtol=0, atol=TOLERANCE * float(self._whole[n].abs().max())):
                        return False
        return True

    def _updates(self, only: Sequence[int], part: slice, *, rest: bool) -> list[Tensor]:
        """Return by how much parts of the parameters `only` change, flat; with the rest of the norm beside them."""
        is_whole = part == slice(None)
        cut = [self._start[n] if is_whole else self._start[n].flatten()[part] for n in only]
        made = [nn.Parameter(tensor.to(self._device, copy=True)) for tensor in cut]
        instead: dict[int, list[nn.Parameter]] = {id(self._parameters[n]): [p] for n, p in zip(only, made, strict=True)}
        host = Snapshot({"": hooks_of(self._optimizer)})
        with seeded(0, 0, self._device):
            optimizer = remade(self._optimizer, instead)
            for group in optimizer.param_groups:
                if isinstance(group.get("lr"), int | float):
                    group["lr"] = max(group["lr"], 1e-2)
            for gradients in self._gradients:
                for n, parameter in zip(only, made, strict=True):
                    parameter.grad = gradients[n].flatten()[part].to(self._device).view_as(parameter).clone()
                norm = torch.stack([gradient.norm() for gradient in gradients]).norm().to(self._device)
                with rest_of_norm(optimizer, norm) if rest else nullcontext():
                    optimizer.step()
        host.put_back()
        return [after.detach().cpu().flatten() - before.flatten() for after, before in zip(made, cut, strict=True)]


def _drawn(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Return numbers in rows of different size, float64."""
    count = torch.Size(shape).numel()
    rows = 0.1 + torch.arange(count, dtype=torch.float64).view(shape) / count
    return rows * torch.randn(shape, generator=random, dtype=torch.float64)


def _shares(sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield some of the parameters of groups of these sizes, by number: all, and such as ranks may have."""
    firsts = [sum(sizes[:n]) for n in range(len(sizes))]
    count, groups = sum(sizes), [range(first, first + size) for first, size in zip(firsts, sizes, strict=True)]
    yield range(count)
    yield [n for group in groups for n in group[1:] or group]
    yield [n for group in groups for n in group[: -(-len(group) // 2)]]
    yield range(1, count) if count > 1 else range(count)
    yield range(-(-count // 2))
    yield [count // 2]
