"""What an optimizer's update of a number depends on: found by stepping small parameters whole and in segments.

    Coupling.NONE      on that number's own gradients: SGD, Adam          any shard of a parameter can be stepped
    Coupling.WITHIN    on its whole parameter: Muon, Adafactor, LAMB      the parameter has to be whole
    Coupling.NORM      on the norm of all gradients, by which it clips    it has to be given the rest of that norm
    Coupling.ACROSS    on other parameters in another way: Prodigy        all parameters have to be on one rank

torch's own are known, and an optimizer may say so itself by an attribute `needs_whole_parameters` (True or False) of it
or its class, and by `needs_gradient_norm` beside it. Of all others copies are tried: one has whole parameters, two have
a half each, one has other gradients in all parameters but the first. What differs by more than rounding tells. Where
others matter, one more copy has the first, and in place of the others the rest of the norm (`rest_of_norm`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from enum import IntFlag
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quintsched.errors import CodeError, UsageError

from ..blocks.blocks import seeded
from .remake import remade, tensors_in
from .rest_of_norm import rest_of_norm

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop")
)
"""Those of torch's whose update of a number depends on no other one."""

WHOLE = ("muon", "adafactor", "shampoo", "soap", "lamb", "lars", "kron", "psgd", "came", "galore", "8bit")
"""What the names of classes have in them whose updates work on whole parameters, perhaps not from the first step on."""

SHAPES: dict[int, list[tuple[int, ...]]] = {
    0: [()],
    1: [(24,)],
    2: [(6, 4), (160, 144)],
    3: [(4, 3, 2)],
    4: [(4, 3, 2, 2)],
}
"""Of how many dimensions a parameter is, and of which sizes such are tried: factors may begin at 128."""

STEPS: dict[tuple[int, ...], int] = {(160, 144): 3}
"""How many steps are tried of parameters of some sizes; of others 24, for some begin by doing less."""


LOUD = 1e8
"""How much larger some gradients are where it is tried whether they matter: no threshold that clips is above that."""


class Coupling(IntFlag):
    """What the update of a number depends on, beside its own gradients."""

    NONE = 0
    WITHIN = 1
    NORM = 2
    ACROSS = 4


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
    for hook in _hooks_of(optimizer):
        cells = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
        reached = [*cells, *getattr(hook, "args", ()), getattr(hook, "__self__", None), getattr(hook, "keywords", {})]
        if any(isinstance(found, nn.Module) for found in reached) or next(tensors_in(reached), None) is not None:
            raise UsageError(
                f"a step hook of {type(optimizer).__name__} has parameters or modules by itself, but a rank steps its "
                "share of them; let the hook take what it works on from the optimizer that it is given: lambda "
                "optimizer, args, kwargs: …(optimizer.param_groups)"
            )


def _hooks_of(optimizer: Optimizer) -> list[Any]:
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def coupling_of(optimizer: Optimizer, device: torch.device) -> Coupling:
    """Return what updates depend on; raises `UsageError` where that cannot be found out."""
    kind = type(optimizer)
    is_torchs = kind.__module__.startswith("torch.optim") and not _hooks_of(optimizer)
    if is_torchs and kind in ELEMENTWISE:
        return Coupling.NONE
    said = getattr(optimizer, "needs_whole_parameters", None)
    if said is not None:
        needs_norm = getattr(optimizer, "needs_gradient_norm", False)
        return (Coupling.WITHIN if said else Coupling.NONE) | (Coupling.NORM if needs_norm else Coupling.NONE)
    named = f"{kind.__module__.partition('.')[0]}.{kind.__name__}".lower()
    floor = Coupling.WITHIN if any(word in named for word in (*WHOLE, "bitsandbytes")) else Coupling.NONE
    if is_torchs and floor is Coupling.WITHIN:
        return floor
    try:
        found = floor | _tried(optimizer, device)
        return Coupling.ACROSS if Coupling.ACROSS in found else found
    except _DrawsError:
        raise UsageError(
            f"{kind.__name__} draws random numbers in its step, and replicas would draw different ones; use an "
            "optimizer that draws none"
        ) from None
    except CodeError:
        raise
    except Exception as error:
        if floor is Coupling.WITHIN:
            return floor
        raise UsageError(
            f"what an update by {kind.__name__} depends on could not be tried ({type(error).__name__}: {error}); say "
            f"it: {kind.__name__}.needs_whole_parameters = True, or False where each number is stepped by itself"
        ) from error


class _DrawsError(Exception):
    """An optimizer steps differently with another seed."""


def _tried(optimizer: Optimizer, device: torch.device) -> Coupling:
    """Step copies of an optimizer, in float64 or, where it cannot, in the type of its parameters.

    An error that does not come again is the optimizer's own, and no word on types: it is raised as `CodeError`.
    """
    for dtype, tolerance in ((torch.float64, 1e-9), (None, 1e-4)):
        try:
            return _try(optimizer, device, dtype, tolerance)
        except _DrawsError:
            raise
        except Exception as error:
            again = _error_of(partial(_try, optimizer, device, dtype, tolerance))
            if type(again) is not type(error):
                kind = type(optimizer).__name__
                raise CodeError(
                    f"the optimizer, {kind}, raised {type(error).__name__}: {error}, as copies of it were stepped "
                    "before the first step, and did not when they were stepped again; it must step alike each time"
                ) from error
            last = error
    raise last


def _error_of(tried: Callable[[], object]) -> Exception | None:
    """Return what a call raises; None: nothing."""
    try:
        tried()
    except Exception as error:
        return error
    return None


def _try(optimizer: Optimizer, device: torch.device, dtype: torch.dtype | None, tolerance: float) -> Coupling:
    """Step copies of an optimizer for every number of dimensions that its parameters have."""
    dims = sorted({min(p.dim(), 4) for group in optimizer.param_groups for p in group["params"]})
    found = Coupling.NONE
    for shape in (shape for dim in dims for shape in SHAPES[dim]):
        trial = _Trial(optimizer, shape, device, dtype)
        whole = trial.updates()
        most = max(float(update.abs().max()) for update in whole)
        if not 0 < most < float("inf"):
            raise ValueError("it changed nothing" if most == 0 else "its numbers were not finite")
        if _off(trial.updates(seed=1), whole) > tolerance * most:
            raise _DrawsError
        if not trial.is_first_alone(whole, tolerance):
            if not trial.goes_by_norm(tolerance):
                return Coupling.ACROSS
            found |= Coupling.NORM
        half, rest = -(-whole[0].numel() // 2), Coupling.NORM in found
        halves = [trial.updates(part, rest=rest) for part in (slice(None, half), slice(half, None))]
        joined = [torch.cat(pair) for pair in zip(*halves, strict=True)]
        if _off(joined, [update.flatten() for update in whole]) > tolerance * most:
            found |= Coupling.WITHIN
    return found


def _off(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference between updates; infinity where one is not finite."""
    off = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    return off if off < float("inf") else float("inf")


class _Trial:
    """Steps copies of an optimizer over small parameters of one shape, up to three in place of those of each group.

    There are three at least: the rest of a norm stands for more than one.
    """

    def __init__(
        self, optimizer: Optimizer, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype | None
    ) -> None:
        self._optimizer, self._shape, self._device = optimizer, shape, device
        taken = [p for group in optimizer.param_groups for p in group["params"][:3]]
        self._taken = [*taken, *taken[-1:] * (3 - len(taken))]
        self._dtypes = [dtype or p.dtype for p in self._taken]

    def is_first_alone(self, whole: Sequence[Tensor], tolerance: float) -> bool:
        """Whether the update of the first parameter is the same where all others have other gradients."""
        return _off(self.updates(loud=True)[:1], whole[:1]) <= tolerance * float(whole[0].abs().max())

    def goes_by_norm(self, tolerance: float) -> bool:
        """Whether it is the same where there is the rest of the norm in place of all others."""
        for loud in (False, True):
            whole = self.updates(loud=loud)[:1]
            try:
                found = self.updates(loud=loud, count=1, rest=True)
            except Exception:
                return False
            if _off(found, whole) > tolerance * float(whole[0].abs().max()):
                return False
        return True

    def updates(
        self,
        part: slice | None = None,
        *,
        loud: bool = False,
        count: int | None = None,
        rest: bool = False,
        seed: int = 0,
    ) -> list[Tensor]:
        """Return by how much each parameter, or a part of it, changes in some steps.

        With `loud`, all parameters but the first get other gradients, large ones in every second step. Only the first
        `count` are stepped, with the rest of the norm of all gradients beside them if `rest`. `seed` is that of torch's
        generators.
        """
        draws = _Draws(self._shape, loud=loud)
        given = [_part(draws(0), part).to(self._device, dtype, copy=True) for dtype in self._dtypes]
        made = [nn.Parameter(tensor) for tensor in given[:count]]
        if not made[0].numel():
            return [parameter.detach().double() for parameter in made]
        instead: dict[int, list[nn.Parameter]] = {}
        for one, other in zip(self._taken, made, strict=False):
            instead.setdefault(id(one), []).append(other)
        optimizer = remade(self._optimizer, instead)
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), int | float):
                group["lr"] = max(group["lr"], 1e-2)
        before = [parameter.detach().to(torch.float64, copy=True) for parameter in made]
        with seeded(seed, 0, self._device):
            for step in range(STEPS.get(self._shape, 24)):
                drawn = [draws(number, step) for number in range(len(self._taken))]
                for parameter, gradient in zip(made, drawn, strict=False):
                    parameter.grad = _part(gradient, part).to(self._device, parameter.dtype, copy=True)
                norm = torch.stack([gradient.norm() for gradient in drawn]).norm().to(self._device)
                with rest_of_norm(optimizer, norm) if rest else nullcontext():
                    optimizer.step()
        return [after.detach().double() - was for after, was in zip(made, before, strict=True)]


def _part(tensor: Tensor, part: slice | None) -> Tensor:
    return tensor if part is None else tensor.flatten()[part]


class _Draws:
    """Draws numbers for parameters, float64, in rows of different size."""

    def __init__(self, shape: tuple[int, ...], *, loud: bool) -> None:
        self._shape, self._loud = shape, loud
        self._random, self._other = torch.Generator().manual_seed(7), torch.Generator().manual_seed(11)
        count = torch.Size(shape).numel()
        self._scale = 0.1 + torch.arange(count, dtype=torch.float64).view(shape) / count

    def __call__(self, number: int, step: int = 0) -> Tensor:
        """Return what is drawn for the parameter of this number in a step."""
        drawn, other = (
            torch.randn(self._shape, generator=generator, dtype=torch.float64)
            for generator in (self._random, self._other)
        )
        if self._loud and number:
            drawn = other * LOUD if step % 2 else other
        return drawn * self._scale * (number + 1)
