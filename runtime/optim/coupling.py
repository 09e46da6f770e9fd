"""What an optimizer's update of a number depends on: found by stepping small parameters whole and in segments.

    Coupling.NONE      on that number's own gradients: SGD, Adam          any shard of a parameter can be stepped
    Coupling.WITHIN    on its whole parameter: Muon, Adafactor, LAMB      the parameter has to be whole
    Coupling.ACROSS    on other parameters: a norm over all, Prodigy      all parameters have to be on one rank

torch's own are known, and an optimizer may say so itself by an attribute `needs_whole_parameters` (True or False) of it
or its class. Of all others copies are tried: one has whole parameters, two have a half each, one has other gradients in
all parameters but the first. What differs by more than rounding tells.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quintsched.errors import CodeError, UsageError

from ..blocks.blocks import seeded
from .remake import remade

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


class Coupling(IntEnum):
    """What the update of a number depends on."""

    NONE = 0
    WITHIN = 1
    ACROSS = 2


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


def coupling_of(optimizer: Optimizer, device: torch.device) -> Coupling:
    """Return what updates depend on; raises `UsageError` where that cannot be found out."""
    kind = type(optimizer)
    if kind in ELEMENTWISE:
        return Coupling.NONE
    said = getattr(optimizer, "needs_whole_parameters", None)
    if said is not None:
        return Coupling.WITHIN if said else Coupling.NONE
    named = f"{kind.__module__.partition('.')[0]}.{kind.__name__}".lower()
    floor = Coupling.WITHIN if any(word in named for word in (*WHOLE, "bitsandbytes")) else Coupling.NONE
    if kind.__module__.startswith("torch.optim") and floor is Coupling.WITHIN:
        return floor
    try:
        return max(floor, _tried(optimizer, device))
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
    for shape in (shape for dim in dims for shape in SHAPES[dim]):
        trial = _Trial(optimizer, shape, device, dtype)
        whole = trial.updates()
        most = max(float(update.abs().max()) for update in whole)
        if not 0 < most < float("inf"):
            raise ValueError("it changed nothing" if most == 0 else "its numbers were not finite")
        if _off(trial.updates(seed=1), whole) > tolerance * most:
            raise _DrawsError
        if _off(trial.updates(others=True)[:1], whole[:1]) > tolerance * float(whole[0].abs().max()):
            return Coupling.ACROSS
        half = -(-whole[0].numel() // 2)
        halves: list[list[Tensor]] = [trial.updates(slice(None, half)), trial.updates(slice(half, None))]
        joined = [torch.cat(pair) for pair in zip(*halves, strict=True)]
        if _off(joined, [update.flatten() for update in whole]) > tolerance * most:
            return Coupling.WITHIN
    return Coupling.NONE


def _off(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference between updates; infinity where one is not finite."""
    off = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    return off if off < float("inf") else float("inf")


class _Trial:
    """Steps copies of an optimizer over small parameters of one shape, two in place of those of each group."""

    def __init__(
        self, optimizer: Optimizer, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype | None
    ) -> None:
        self._optimizer, self._shape, self._device = optimizer, shape, device
        self._taken = [p for group in optimizer.param_groups for p in group["params"][:2]]
        self._dtypes = [dtype or p.dtype for p in self._taken]

    def updates(self, part: slice | None = None, *, others: bool = False, seed: int = 0) -> list[Tensor]:
        """Return by how much each parameter, or a part of it, changes in some steps.

        With `others`, all parameters but the first get other gradients; `seed` is that of torch's generators.
        """
        draws = _Draws(self._shape, part, others)
        made = [nn.Parameter(draws(0, dtype).to(self._device)) for dtype in self._dtypes]
        if not made[0].numel():
            return [parameter.detach().double() for parameter in made]
        optimizer = remade(self._optimizer, {id(one): [other] for one, other in zip(self._taken, made, strict=True)})
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), int | float):
                group["lr"] = max(group["lr"], 1e-2)
        before = [parameter.detach().to(torch.float64, copy=True) for parameter in made]
        with seeded(seed, 0, self._device):
            for _ in range(STEPS.get(self._shape, 24)):
                for number, (parameter, dtype) in enumerate(zip(made, self._dtypes, strict=True)):
                    parameter.grad = draws(number, dtype).to(self._device)
                optimizer.step()
        return [after.detach().double() - was for after, was in zip(made, before, strict=True)]


class _Draws:
    """Draws numbers for parameters, in rows of different size."""

    def __init__(self, shape: tuple[int, ...], part: slice | None, others: bool) -> None:
        self._shape, self._part, self._others = shape, part, others
        self._random, self._other = torch.Generator().manual_seed(7), torch.Generator().manual_seed(11)
        count = torch.Size(shape).numel()
        self._scale = 0.1 + torch.arange(count, dtype=torch.float64).view(shape) / count

    def __call__(self, number: int, dtype: torch.dtype) -> Tensor:
        """Return what is drawn for the parameter of this number."""
        drawn, other = (
            torch.randn(self._shape, generator=generator, dtype=torch.float64)
            for generator in (self._random, self._other)
        )
        found = (other if self._others and number else drawn) * self._scale * (number + 1)
        return (found if self._part is None else found.flatten()[self._part]).to(dtype, copy=True)
