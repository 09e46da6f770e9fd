"""What an optimizer's update of a number depends on: found by stepping small parameters whole and in segments.

    Coupling.NONE      on that number's own gradients: SGD, Adam          any shard of a parameter can be stepped
    Coupling.WITHIN    on its whole parameter: Muon, Adafactor, LAMB      the parameter has to be whole
    Coupling.NORM      on the norm of all gradients, by which it clips    it has to be given the rest of that norm
    Coupling.ACROSS    on other parameters in another way: Prodigy        all parameters have to be on one rank,
                       on its place, or on how many there are             in their order

torch's own are known, and an optimizer may say so itself by an attribute `needs_whole_parameters` (True or False) of it
or its class, and by `needs_gradient_norm` beside it. Of all others copies are tried: one has whole parameters, two have
a half each, one has other gradients in all parameters but the first. What differs by more than rounding tells. Where
others matter, one more copy has the first, and in place of the others the rest of the norm (`rest_of_norm`). At last
some have only some of the parameters, as ranks do: each must be stepped as it is among all. What a trial changes on the
host, such as a hook's counter, is put back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from enum import IntFlag
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quintsched.errors import CodeError, UsageError

from ..blocks.blocks import seeded
from ..objects.snapshot import Snapshot
from ..objects.user_code import globals_of
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

UPDATES_OF_ALL = 512
"""How many updates are tried of all the parameters together, in 3 to 24 steps."""

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
    return f"{type(optimizer).__name__}{' with its step hooks' if _hooks_of(optimizer) else ''}"


def _hooks_of(optimizer: Optimizer) -> list[Any]:
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def _code_of(optimizer: Optimizer) -> list[Any]:
    """Return the code of a step, which may keep something on the host that copies of the optimizer have in common."""
    return [*_hooks_of(optimizer), type(optimizer)]


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
    before = Snapshot({"": _code_of(optimizer)})
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
    finally:
        before.put_back()


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
    """Step copies of an optimizer for every number of dimensions that its parameters have, and some of all of them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    dims = sorted({min(p.dim(), 4) for p in parameters})
    found = Coupling.NONE
    for shape in (shape for dim in dims for shape in SHAPES[dim]):
        taken = [p for group in optimizer.param_groups for p in group["params"][:3]]
        taken += taken[-1:] * (3 - len(taken))  # the rest of a norm stands for more than one
        trial = _Trial(optimizer, {id(p): shape for p in taken}, taken, device, dtype, STEPS.get(shape, 24))
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
    shapes = {id(p): SHAPES[min(p.dim(), 4)][0] for p in parameters}
    steps = min(max(UPDATES_OF_ALL // len(parameters), 3), 24)
    everything = _Trial(optimizer, shapes, parameters, device, dtype, steps)
    alike = everything.steps_some_alike(tolerance, rest=Coupling.NORM in found)
    return found if alike else Coupling.ACROSS


def _off(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference between updates; infinity where one is not finite."""
    off = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    return off if off < float("inf") else float("inf")


def _some(sizes: Sequence[int]) -> Iterator[tuple[bool, list[int]]]:
    """Yield some of the parameters of groups of these sizes, by number, and whether every group has one."""
    firsts = [sum(sizes[:n]) for n in range(len(sizes))]
    count, groups = sum(sizes), [range(first, first + size) for first, size in zip(firsts, sizes, strict=True)]
    yield True, [n for group in groups for n in group[1:] or group]
    yield True, [n for group in groups for n in group[: -(-len(group) // 2)]]
    if len(groups) > 1:
        yield False, [*range(1, count)]
        yield False, [*range(-(-count // 2))]
    yield False, [count // 2]


class _Trial:
    """Steps copies of an optimizer over small parameters.

    Args:
        shapes: those of the parameters that stand for others, by the ids of these.
        taken: for which there are some.
        steps: how many are made.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        shapes: Mapping[int, tuple[int, ...]],
        taken: Sequence[nn.Parameter],
        device: torch.device,
        dtype: torch.dtype | None,
        steps: int,
    ) -> None:
        self._optimizer, self._taken, self._device, self._steps = optimizer, taken, device, steps
        self._shapes = [shapes[id(p)] for p in taken]
        self._dtypes = [dtype or p.dtype for p in taken]
        self._drawn: dict[bool, list[list[Tensor]]] = {}

    def is_first_alone(self, whole: Sequence[Tensor], tolerance: float) -> bool:
        """Whether the update of the first parameter is the same where all others have other gradients."""
        return _off(self.updates(loud=True)[:1], whole[:1]) <= tolerance * float(whole[0].abs().max())

    def goes_by_norm(self, tolerance: float) -> bool:
        """Whether it is the same where there is the rest of the norm in place of all others."""
        for loud in (False, True):
            whole = self.updates(loud=loud)[:1]
            try:
                found = self.updates(loud=loud, only=[0], rest=True)
            except Exception:
                return False
            if _off(found, whole) > tolerance * float(whole[0].abs().max()):
                return False
        return True

    def steps_some_alike(self, tolerance: float, *, rest: bool) -> bool:
        """Whether each parameter is stepped alike among all and among some: in other places, and fewer of them."""
        whole = self.updates()
        for fills_groups, only in _some([len(group["params"]) for group in self._optimizer.param_groups]):
            try:
                found = self.updates(only=only, rest=rest and len(only) < len(whole))
            except Exception:
                if fills_groups:
                    raise
                continue  # it raises so on a rank that has nothing of a group, too
            expected = [whole[n] for n in only]
            if _off(found, expected) > tolerance * max(float(update.abs().max()) for update in expected):
                return False
        return True

    def updates(
        self,
        part: slice | None = None,
        *,
        loud: bool = False,
        only: Sequence[int] | None = None,
        rest: bool = False,
        seed: int = 0,
    ) -> list[Tensor]:
        """Return by how much each parameter, or a part of it, changes in some steps.

        With `loud`, all parameters but the first get other gradients, large ones in every second step. Of the
        parameters, there are those with the numbers `only`, with the rest of the norm of all gradients beside them if
        `rest`. `seed` is that of the global generators.
        """
        only = range(len(self._taken)) if only is None else only
        given, *gradients = self._draw(loud=loud)
        made = [nn.Parameter(_part(given[n], part).to(self._device, self._dtypes[n], copy=True)) for n in only]
        if not made[0].numel():
            return [parameter.detach().double() for parameter in made]
        instead: dict[int, list[nn.Parameter]] = {}
        for number, parameter in zip(only, made, strict=True):
            instead.setdefault(id(self._taken[number]), []).append(parameter)
        before = [parameter.detach().to(torch.float64, copy=True) for parameter in made]
        host = Snapshot({"": _code_of(self._optimizer)})
        with seeded(seed, 0, self._device):
            optimizer = remade(self._optimizer, instead)
            for group in optimizer.param_groups:
                if isinstance(group.get("lr"), int | float):
                    group["lr"] = max(group["lr"], 1e-2)
            for drawn in gradients:
                for number, parameter in zip(only, made, strict=True):
                    parameter.grad = _part(drawn[number], part).to(self._device, parameter.dtype, copy=True)
                with rest_of_norm(optimizer, _norm(drawn).to(self._device)) if rest else nullcontext():
                    optimizer.step()
        host.put_back()
        return [after.detach().double() - was for after, was in zip(made, before, strict=True)]

    def _draw(self, *, loud: bool) -> list[list[Tensor]]:
        """Return numbers for parameters, and for their gradients in each step: float64, in rows of different size."""
        if loud not in self._drawn:
            draws = _Draws(loud=loud)
            self._drawn[loud] = [
                [draws(number, shape, step) for number, shape in enumerate(self._shapes)]
                for step in (0, *range(self._steps))
            ]
        return self._drawn[loud]


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    norm: Tensor = torch.stack([gradient.norm() for gradient in gradients]).norm()
    return norm


def _part(tensor: Tensor, part: slice | None) -> Tensor:
    return tensor if part is None else tensor.flatten()[part]


class _Draws:
    """Draws numbers for parameters, float64, in rows of different size."""

    def __init__(self, *, loud: bool) -> None:
        self._loud = loud
        self._random, self._other = torch.Generator().manual_seed(7), torch.Generator().manual_seed(11)

    def __call__(self, number: int, shape: tuple[int, ...], step: int = 0) -> Tensor:
        """Return what is drawn for the parameter of this number in a step."""
        drawn, other = (
            torch.randn(shape, generator=generator, dtype=torch.float64) for generator in (self._random, self._other)
        )
        if self._loud and number:
            drawn = other * LOUD if step % 2 else other
        count = torch.Size(shape).numel()
        scale = 0.1 + torch.arange(count, dtype=torch.float64).view(shape) / count
        return drawn * scale * (number + 1)
