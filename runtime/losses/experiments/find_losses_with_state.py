"""Detection of functions whose results depend on state that their own earlier calls have written.

state ──────────────────────── A ──▶ L(A)      equal for equal inputs, whatever other calls came before:
state ── others, of fewer ──── A ──▶ L(A)      a mask cached per length, a list of losses that is never read

counters + 10, 100, …, 10⁶ ─── A ──▶ L(A)      annealed, switched on after a while: differs
other numbers of a tensor ──── A ──▶ L(A)      a running mean, a flag on the device: differs
state before a step ────────── A ──▶ L(A)      normalised by a first value, a flag that the data have set: differs
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...comm.random_generators import AllGenerators
from ..save_and_restore_loss_state import FunctionKept, FunctionState, name_of

_FAR = (10, 100, 1_000, 10_000, 1_000_000)
CallLosses = Callable[[], Sequence[Tensor]]


def depends_on_calls(
    state: FunctionState, kept: FunctionKept, run: CallLosses, others: Sequence[CallLosses]
) -> str | None:
    """Return the name of state that a function's calls write and it reads; None: none; its state is restored.

    Args:
        state: of the function, as noted before the calls in question.
        kept: its present state, to restore.
        run: calls it on some inputs, and returns its results.
        others: calls on other inputs.
    """
    generators = AllGenerators(kept.device)

    def again() -> Sequence[Tensor]:
        generators.put_back()
        return run()

    def written() -> str | None:
        return next((slot.name for slot in state.moved()), None)

    try:
        expected = again()
        kept.put_back()
        for call in others:
            with suppress(Exception):  # errors of user code on batches that it never gets
                call()
        if not _are_alike(expected, again()):
            return written() or "something"
        for place, value in _other_values(state, again):
            if not place.write(value) or not _are_alike(expected, again()):
                return place.name
    except Exception:  # errors of user code on state that it has not written
        return written()
    finally:
        kept.put_back()
        generators.put_back()
    return None


def goes_by_written(state: FunctionState, kept: FunctionKept, run: CallLosses, names: Collection[str]) -> str | None:
    """Return the name of state that earlier calls of a function wrote and it reads now; None: none.

    Example: it collects means in training, and reads them in evaluation, or once a flag is set.

    Args:
        state: of the function, as it was before any call.
        kept: its present state, to restore.
        run: calls it on some inputs, and returns its results.
        names: of the state that calls have written, see `FunctionState.written`.
    """
    generators = AllGenerators(kept.device)

    def again() -> Sequence[Tensor]:
        generators.put_back()
        try:
            return run()
        finally:
            kept.put_back()

    try:
        expected = again()
        for place, value in _written_otherwise(state, names):
            if place.write(value) and not _are_alike(expected, again()):
                return place.name
    except Exception:  # errors of user code on state that it has not written
        return None
    finally:
        kept.put_back()
        generators.put_back()
    return None


def _written_otherwise(state: FunctionState, names: Collection[str]) -> Iterator[tuple[_WrittenPlace, Any]]:
    for slot in state.moved():
        now = slot.read()
        if name_of(slot) in names and not slot.counts_entries and isinstance(now, Tensor | bool | int | float):
            seen = (slot.seen,) if isinstance(slot.seen, bool | int | float) else ()
            yield from ((_WrittenPlace(slot.name, slot.write), value) for value in (*seen, *_others(now)))
    for tensor in state.tensors_moved():
        if str(id(tensor)) in names:
            yield from ((_WrittenPlace("a tensor", partial(_fill, tensor)), value) for value in _others(tensor))


def _others(now: Any) -> list[Any]:
    """Return other values of a flag, number or tensor, which may be far beyond a threshold."""
    if isinstance(now, bool):
        return [not now]
    if isinstance(now, Tensor):
        return [~now] if now.dtype is torch.bool else [now * 3 + 7, torch.zeros_like(now)]
    return [now * 3 + 7, 0]


class _WrittenPlace(NamedTuple):
    """Place that calls have written, with a function to write it."""

    name: str
    write: Callable[[Any], bool]


def _other_values(state: FunctionState, run: CallLosses) -> Iterator[tuple[_WrittenPlace, Any]]:
    """Yield places that calls have written, each with another value: the former one, or a larger count.

    A place that a further call changes again may hold any value; a tensor that it leaves alone is a cache.
    """
    moved, changed = state.moved(), state.tensors_moved()
    before = [slot.read() for slot in moved]
    versions = [tensor._version for tensor in changed]
    run()
    for slot, was in zip(moved, before, strict=True):
        now, place = slot.read(), _WrittenPlace(slot.name, slot.write)
        if slot.counts_entries:
            if isinstance(many := slot.read.args[0], list) and many and now != was:
                yield _WrittenPlace(slot.name, partial(_extend, many)), many[-1]
        elif isinstance(now, Tensor):
            if now is not was:
                yield place, ~now if now.dtype is torch.bool else now * 3 + 7
        elif isinstance(now, bool | int | float):
            if slot.seen is None or isinstance(slot.seen, bool | int | float):
                yield place, slot.seen
            for more in _FAR if now != was and not isinstance(now, bool) else ():
                yield place, now + more
    for tensor, version in zip(changed, versions, strict=True):
        if tensor._version != version:
            yield (
                _WrittenPlace("a tensor", partial(_fill, tensor)),
                ~tensor if tensor.dtype is torch.bool else tensor * 3 + 7,
            )


def _extend(entries: list[Any], value: Any) -> bool:
    entries.extend([value] * _FAR[-2])
    return True


def _fill(tensor: Tensor, value: Tensor) -> bool:
    tensor.detach().copy_(value.detach())
    return True


def _are_alike(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(_is_alike(a, b) for a, b in zip(one, other, strict=True))


def _is_alike(one: Tensor, other: Tensor) -> bool:
    if one.device.type != "cpu":
        return bool(torch.isclose(one, other, 1e-4, 1e-7, equal_nan=True))
    least = 1e-9 if one.dtype is torch.float64 else 1e-6
    return bool(torch.isclose(one, other, least, least * 1e-3, equal_nan=True))
