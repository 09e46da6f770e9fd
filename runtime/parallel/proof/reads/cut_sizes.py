"""Compared call by call: a block whole, and as a rank has it. A size that is cut steers nothing but shapes.

    whole    view(2, 6, 4, 8)    mul(h, 0.25)    zeros(2, 6, 16)    arange(16)
    cut      view(2, 6, 2, 8)    mul(h, 0.35)    zeros(2, 6, 8)     arange(8)
             a shape             a number: none  all alike          places, of the first rank alone: none

Where features are apart (`feature_owners`) and calls are the same, each rank computes what the whole does, whatever the
numbers in tensors are, in training and where it draws. What a row gives is what it gave to the whole, so that all else
is the same, too; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ....settings.tensor_rules import TensorSplit
from ...tensor.cuts import Cut
from ...tensor.pairs import wide_norms
from ..feature_owners import DRAWN, FeatureOwners, line
from ..owner_rules import MOVING, Joined, is_one, is_pointwise, name_of

_KEPT_VIEWS = {"slice", "select", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "lift_fresh"}
_COPIES = {"clone", "_unsafe_view", "_reshape_alias", "_reshape_copy", "view_copy", "expand_copy", "lift_fresh_copy"}
"""Whether there is one depends on how numbers lie in memory."""
_MADE = DRAWN | {"zeros", "ones", "full", "empty", "empty_strided", "zero", "fill"}
"""Functions that make all numbers alike, or draw each by itself."""
_SIZES = {"size", "stride", "normalized_shape", "repeats", "N", "C", "HxW", "group", "groups"}
_ALONG = {"start", "end", "split_size", "split_sizes"}
"""Arguments that may go by a size that is cut: those of shapes, and of a dimension that is cut."""
_OURS = "quintsched.runtime.parallel."

Argument = tuple[str, Any]


@dataclass(frozen=True)
class _Call:
    """A call of a function: its arguments by name, leaf by leaf, and what came of it."""

    name: str
    given: Sequence[Argument]
    owners: Sequence[Tensor | None]
    """Of the arguments, where features are among them."""
    shapes: Sequence[torch.Size]
    result: Any


class _Calls(TorchDispatchMode):
    """Hears what is called outside of layers that are cut, and of what of this package is told how it is cut."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inside = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = name_of(func)
        is_heard = not (self._inside or name in _COPIES or (func.is_view and name not in _KEPT_VIEWS))
        return self._hear(func, name, args, kwargs or {}, result) if is_heard else result

    def _hear(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        raise NotImplementedError

    def _give(self, result: Tensor) -> Tensor:
        raise NotImplementedError

    @contextmanager
    def around(self, twin: nn.Module, apart: Mapping[str, bool]) -> Iterator[None]:
        """A context in which what is called in modules of these names is their own business; `True` marks rows."""
        handles = []
        modules = dict(twin.named_modules())
        for name, is_row in apart.items():
            handles.append(modules[name].register_forward_pre_hook(self._enter, prepend=True))
            handles.append(modules[name].register_forward_hook(self._leave_row if is_row else self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside += 1

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._inside -= 1

    def _leave_row(self, module: nn.Module, args: Any, result: Tensor) -> Tensor:
        given = self._give(result)
        self._inside -= 1
        return given


class WholeCalls(_Calls):
    """Notes what a block calls whose features are followed."""

    def __init__(self, owners: FeatureOwners) -> None:
        super().__init__()
        self._owners = owners
        self.calls: list[_Call] = []
        self.rows: list[Tensor] = []

    def _hear(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        given = _arguments(func, args, kwargs)
        owned = [self._owners.known(leaf) if isinstance(leaf, Tensor) else None for _, leaf in given]
        is_constant = name == "lift_fresh"  # made of Python's numbers
        kept = [
            (key, leaf if not isinstance(leaf, Tensor) else leaf.clone() if is_constant else leaf.shape)
            for key, leaf in given
        ]
        answer = None if isinstance(result, Tensor | Sequence) else result
        answer = result.clone() if name in DRAWN else answer
        self.calls.append(_Call(name, kept, owned, _shapes(result), answer))
        return result

    def _give(self, result: Tensor) -> Tensor:
        self.rows.append(result.detach().clone())
        return result


class CutCalls(_Calls):
    """Raises `Joined` where a block that is cut calls something else than the whole did."""

    def __init__(self, whole: WholeCalls) -> None:
        super().__init__()
        self._left, self._rows = iter(whole.calls), iter(whole.rows)

    def _hear(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        was = next(self._left, None)
        if was is None or was.name != name:
            other = "nothing" if was is None else was.name
            raise Joined(f"calls {name} where its features are cut, and {other} where it is whole{line()}")
        given = _arguments(func, args, kwargs)
        cut = [
            isinstance(leaf, Tensor) and isinstance(its, torch.Size) and leaf.shape != its
            for (_, leaf), (_, its) in zip(given, was.given, strict=False)
        ]
        why = "" if len(given) == len(was.given) else "other arguments"
        why = why or next(
            filter(None, (_unlike(*pair, given, was.given) for pair in zip(given, was.given, strict=True))), ""
        )
        is_made = name.removeprefix("new_").removesuffix("_like") in _MADE
        if not why and not is_made:
            is_each = is_pointwise(name, func) or name in MOVING
            why = next(filter(None, map(partial(_why_unowned, is_each), given, was.given, was.owners)), "")
        if not why and not any(cut) and not is_made and _shapes(result) != was.shapes:
            why = "a part of the places"
        if why:
            raise Joined(f"goes by a size that is cut: it gives {why} to {name}{line()}")
        if isinstance(was.result, Tensor):
            return result.copy_(was.result) if result.shape == was.result.shape else result
        return result if was.result is None else was.result

    def _give(self, result: Tensor) -> Tensor:
        whole = next(self._rows, None)
        if whole is None or whole.shape != result.shape:
            return result
        return result + (whole - result.detach())

    def require_all(self) -> None:
        """Raise `Joined` where the whole called more."""
        if (more := next(self._left, None)) is not None:
            raise Joined(f"calls {more.name} where it is whole alone, by a size that is cut")


def apart_in(twin: nn.Module, cuts: Iterable[Cut]) -> dict[str, bool]:
    """Return the names of modules of a twin that know how they are cut; `True` for rows of pairs."""
    cuts = list(cuts)
    known = {id(cut.layer): cut.is_paired and cut.split is TensorSplit.ROW for cut in cuts}
    known |= {id(module): False for module, _ in wide_norms(cuts)}
    found = dict[str, bool]()
    for name, module in twin.named_modules():
        is_ours = isinstance(module, _DropoutNd) or type(module).__module__.startswith(_OURS)
        if id(module) in known or is_ours:
            found[name] = known.get(id(module), False)
    return found


def _unlike(now: Argument, was: Argument, given: Sequence[Argument], before: Sequence[Argument]) -> str:
    """Return what is another argument than it was, in words; empty: it is the same, or part of a shape."""
    (name, leaf), (_, its) = now, was
    if isinstance(leaf, Tensor):
        is_same = isinstance(its, torch.Size) or (isinstance(its, Tensor) and torch.equal(leaf, its))
        return "" if is_same else "other numbers"
    if leaf == its or leaf is its or (leaf != leaf and its != its):
        return ""
    if type(leaf) is type(its) is int and (name in _SIZES or (name in _ALONG and _is_along_cut(given, before))):
        return ""
    return f"{leaf} in place of {its}"


def _is_along_cut(given: Sequence[Argument], before: Sequence[Argument]) -> bool:
    """Whether a function goes along a dimension that is cut."""
    dim = next((leaf for name, leaf in given if name == "dim"), 0)
    (_, tensor), (_, shape) = given[0], before[0]
    return isinstance(tensor, Tensor) and bool(tensor.shape[dim] != shape[dim])


def _why_unowned(is_each: bool, now: Argument, was: Argument, owners: Tensor | None) -> str:
    """Return along which dimension ranks have other features than it says, in words; empty: none.

    One along which several ranks have features is that of a rank where they are cut, and no other is, but for
    functions that make each number by itself (`is_each`).
    """
    (_, tensor), (_, shape) = now, was
    if not isinstance(tensor, Tensor) or not isinstance(shape, torch.Size) or tensor.dim() != len(shape):
        return ""
    for dim, (size, whole) in enumerate(zip(tensor.shape, shape, strict=True)):
        if size == whole and owners is not None and not is_one(owners, [dim]):
            return f"features of a rank in {size} places that are those of several"
        is_cut = owners is not None and bool((owners != owners.narrow(dim, 0, 1)).any())
        if size != whole and not is_each and not is_cut:
            return f"{size} numbers of no features in place of {whole}"
    return ""


def _arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Argument]:
    names = (argument.name for argument in func._schema.arguments)
    named = [*zip(names, args, strict=False), *kwargs.items()]
    return [(name, leaf) for name, value in named for leaf in tree_leaves(value)]


def _shapes(result: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
