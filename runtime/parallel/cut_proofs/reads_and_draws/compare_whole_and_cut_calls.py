"""Comparison, operator by operator, of a block whole and cut: a cut size may affect shapes, but no numbers.

    whole    view(2, 6, 4, 8)    mul(h, 0.25)     zeros(2, 6, 16)    arange(16)
    cut      view(2, 6, 2, 8)    mul(h, 0.35)     zeros(2, 6, 8)     arange(8)
             a shape: allowed    a number: not    a fill: allowed    positions of the first rank only: not

If features are apart (`taint_features_by_rank`) and calls are equal, each rank computes the same as the whole block,
whatever the numbers in tensors are, in training and with draws. In the cut run the results of row layers are replaced
by those of the whole run, so that all other numbers agree too, without communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ....settings.tensor_parallel_rules import TensorSplit
from ....user_objects.find_impure_code import unrecorded
from ...tensor.adjust_modules_around_pairs import wide_norms
from ...tensor.cuttable_layers import Cut, sizes_of
from ..marks.operator_rules_for_taint import MOVING, Joined, blended, is_one, is_pointwise, name_of
from ..marks.value_numbers_of_elements import DRAWN, FILLED, Labels, are_alike
from ..taint_features_by_rank import FeatureOwners, line

_KEPT_VIEWS = {"slice", "select", "split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "lift_fresh"}
_COPIES = {"clone", "_unsafe_view", "_reshape_alias", "_reshape_copy", "view_copy", "expand_copy", "lift_fresh_copy"}
"""Copies that are made or not depending on strides, and so are not compared."""
_SIZES = {"size", "stride", "normalized_shape", "repeats", "N", "C", "HxW", "group", "groups"}
_ALONG = {"start", "end", "split_size", "split_sizes"}
"""Arguments that may depend on a cut size: those of shapes (`_SIZES`), and of a cut dimension (`_ALONG`)."""
_OURS = "quintsched.runtime.parallel."

Argument = tuple[str, Any]


class OtherCalls(Joined):
    """Raised if a cut block calls other operators than the whole; a second attempt shows whether that persists."""


@dataclass(frozen=True)
class _OperatorCall:
    """Record of an operator call: its arguments by name, as flat leaves, and its result."""

    name: str
    given: Sequence[Argument]
    owners: Sequence[Tensor | None]
    """Owners of each argument's elements; None for those without features."""
    shapes: Sequence[torch.Size]
    result: Any


@dataclass(frozen=True)
class CutAwareModule:
    """A module that is aware of its cut; its features are contiguous by rank.

    Attributes:
        takes: number of input features of a row, or of a norm of the whole width; None for others.
        gives: whether its output consists of features: of a column, or of such a norm.
        is_row: whether it is the row of a pair.
    """

    takes: int | None = None
    gives: bool = False
    is_row: bool = False


@dataclass(frozen=True)
class _Taken:
    """Labels of the input of a row or norm, with its class name and the line of user code that called it."""

    labels: Tensor
    name: str
    line: str


class _OperatorsOutsideCuts(TorchDispatchMode):
    """Dispatch mode that processes operators outside of cut layers and of this package's cut-aware modules."""

    def __init__(self, *, trusts: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trusts, self._inside, self._is_on = trusts, 0, False
        self._labels: Labels
        self.taken: list[_Taken] = []

    def __enter__(self) -> Self:
        self._is_on = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *about: object) -> None:
        self._is_on = False
        super().__exit__(*about)  # type: ignore[no-untyped-call]

    @unrecorded
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result, given = func(*args, **(kwargs or {})), kwargs or {}
        name = name_of(func)
        if self._inside or (func.is_view and name not in _KEPT_VIEWS):
            return result
        if name in _COPIES:
            with self._unfollowed():
                self._labels.follow_call(func, args, given, result, of_features=False)
            return result
        return self._hear(func, name, args, given, result)

    def _hear(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        raise NotImplementedError

    def _has_features(self, x: Tensor, width: int) -> bool:
        """Whether the input of a module that takes `width` features is sharded."""
        return x.shape[-1] != width

    def _give(self, result: Tensor) -> Tensor:
        raise NotImplementedError

    @contextmanager
    def _unfollowed(self) -> Iterator[None]:
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def _owners_of(self, result: Tensor) -> Tensor | None:
        return None

    @contextmanager
    def around(self, twin: nn.Module, apart: Mapping[str, CutAwareModule]) -> Iterator[None]:
        """Context for a run of a twin, in which calls within the modules of `apart`, by name, are skipped."""
        modules = dict(twin.named_modules())
        self._labels = Labels(twin, trusts=self._trusts)
        with ExitStack() as hooks:
            for name, its in apart.items():
                hooks.enter_context(modules[name].register_forward_pre_hook(partial(self._enter, its), prepend=True))
                hooks.enter_context(modules[name].register_forward_hook(partial(self._leave, its)))
            yield

    def _enter(self, its: CutAwareModule, module: nn.Module, args: Any) -> None:
        x = args[0] if args else None
        if its.takes and isinstance(x, Tensor) and not self._inside and self._is_on:
            with self._unfollowed():
                if its.is_row or self._has_features(x, its.takes):
                    self.taken.append(_Taken(self._labels.labels_of(x), type(module).__name__, line()))
        self._inside += 1

    def _leave(self, its: CutAwareModule, module: nn.Module, args: Any, result: Any) -> Any:
        given = self._give(result) if its.is_row else result
        self._inside -= 1
        if not self._inside and self._is_on:
            with self._unfollowed():
                if not isinstance(module, _DropoutNd):
                    self._labels.place(given, self._owners_of(given) if its.gives else None)
                elif module.training and module.p:
                    self._labels.set_labels(given, blended("dropout", self._labels.labels_of(args[0])))
        return given if its.is_row else None


class WholeCalls(_OperatorsOutsideCuts):
    """Recorder of the calls of a whole block, whose features are tracked by `owners`."""

    def __init__(self, owners: FeatureOwners, *, trusts: bool) -> None:
        super().__init__(trusts=trusts)
        self._owners = owners
        self.calls: list[_OperatorCall] = []
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
        self.calls.append(_OperatorCall(name, kept, owned, _shapes(result), answer))
        of_features = any(owners is not None for owners in owned)
        with self._unfollowed():
            self._labels.follow_call(func, args, kwargs, result, of_features=of_features)
        return result

    @contextmanager
    def _unfollowed(self) -> Iterator[None]:
        with super()._unfollowed(), self._owners.unfollowed():
            yield

    @property
    def whole_numbers(self) -> Sequence[Tensor]:
        """Integer tensors that no tracked operator made."""
        return self._labels.whole_numbers

    def _owners_of(self, result: Tensor) -> Tensor | None:
        return self._owners.owners_of(result)

    def _has_features(self, x: Tensor, width: int) -> bool:
        return bool(self._owners.owners_of(x).any())

    def _give(self, result: Tensor) -> Tensor:
        self.rows.append(result.detach().clone())
        return result


class CutCalls(_OperatorsOutsideCuts):
    """Checker of the calls of a cut block: raises `Joined` if they differ from those of the whole."""

    def __init__(self, whole: WholeCalls, *, trusts: bool) -> None:
        super().__init__(trusts=trusts)
        self._left, self._rows = iter(whole.calls), iter(whole.rows)
        self._whole = whole

    def _hear(self, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        was = next(self._left, None)
        if was is None or was.name != name:
            other = "nothing" if was is None else was.name
            raise OtherCalls(f"calls {name} where its features are cut, and {other} where it is whole{line()}")
        if name in DRAWN and _shapes(result) != was.shapes:
            raise Joined(
                f"draws by {name} for its part of features, between the layers of a pair{line()}: draw a number for "
                "each sample, or use a dropout"
            )
        given = _arguments(func, args, kwargs)
        cut = [
            isinstance(leaf, Tensor) and isinstance(its, torch.Size) and leaf.shape != its
            for (_, leaf), (_, its) in zip(given, was.given, strict=False)
        ]
        why = "" if len(given) == len(was.given) else "other arguments"
        why = why or next(
            filter(None, (_unlike(*pair, given, was.given) for pair in zip(given, was.given, strict=True))), ""
        )
        is_made = name.removeprefix("new_").removesuffix("_like") in FILLED
        if not why and not is_made:
            is_each = is_pointwise(name, func) or name in MOVING
            why = next(filter(None, map(partial(_why_unowned, is_each), given, was.given, was.owners)), "")
        if not why and not any(cut) and not is_made and _shapes(result) != was.shapes:
            why = "a part of the places"
        if why:
            raise Joined(f"goes by a size that is cut: it gives {why} to {name}{line()}")
        of_features = any(owners is not None for owners in was.owners)
        self._labels.follow_call(func, args, kwargs, result, of_features=of_features)
        if isinstance(was.result, Tensor):
            return result.copy_(was.result) if result.shape == was.result.shape else result
        return result if was.result is None else was.result

    def _give(self, result: Tensor) -> Tensor:
        whole = next(self._rows, None)
        if whole is None or whole.shape != result.shape:
            return result
        return result + (whole - result.detach())

    def require_all(self) -> None:
        """Raise `Joined` if the whole block made more calls, or its rows took features of other labels."""
        if (more := next(self._left, None)) is not None:
            raise OtherCalls(f"calls {more.name} where it is whole alone, by a size that is cut")
        here, there = self._labels.whole_numbers, self._whole.whole_numbers
        if len(here) != len(there) or not all(map(torch.equal, here, there)):
            raise Joined("goes by a size that is cut: it makes whole numbers of it that no function is seen to make")
        if len(self.taken) != len(self._whole.taken):
            raise Joined("gives its rows features another number of times where it is cut")
        for taken, whole in zip(self.taken, self._whole.taken, strict=True):
            if not are_alike(taken.labels, whole.labels):
                raise Joined(
                    "does to some features what it does not do to all, by their places, where each rank has others, "
                    f"and gives them to {whole.name}{whole.line}"
                )


def apart_in(twin: nn.Module, cuts: Iterable[Cut]) -> dict[str, CutAwareModule]:
    """Return the modules of a twin that are aware of their cut, by name."""
    cuts, known = list(cuts), dict[int, CutAwareModule]()
    for cut in cuts:
        is_row, is_column = (cut.is_paired and cut.split is split for split in (TensorSplit.ROW, TensorSplit.COLUMN))
        known[id(cut.layer)] = CutAwareModule(sizes_of(cut.layer)[0] if is_row else None, is_column, is_row)
    known |= {id(module): CutAwareModule(width, gives=True) for module, width in wide_norms(cuts)}
    found = dict[str, CutAwareModule]()
    for name, module in twin.named_modules():
        is_ours = isinstance(module, _DropoutNd) or type(module).__module__.startswith(_OURS)
        if id(module) in known or is_ours:
            found[name] = known.get(id(module), CutAwareModule())
    return found


def _unlike(now: Argument, was: Argument, given: Sequence[Argument], before: Sequence[Argument]) -> str:
    """Return, in words, how an argument differs from the whole run's; empty: it is equal, or an allowed size."""
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
    """Whether an operator works along a cut dimension."""
    dim = next((leaf for name, leaf in given if name == "dim"), 0)
    (_, tensor), (_, shape) = given[0], before[0]
    return isinstance(tensor, Tensor) and bool(tensor.shape[dim] != shape[dim])


def _why_unowned(is_each: bool, now: Argument, was: Argument, owners: Tensor | None) -> str:
    """Return, in words, why a cut argument is not this rank's part of the whole one; empty: it is.

    A dimension along which elements have several owners must be cut, and no other may be, except in pointwise and
    moving operators (`is_each`).
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
    if tensor.shape == shape and owners is not None and bool(owners.any()):
        return "features at some places, where others have other features,"
    return ""


def _arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Argument]:
    names = (argument.name for argument in func._schema.arguments)
    named = [*zip(names, args, strict=False), *kwargs.items()]
    return [(name, leaf) for name, value in named for leaf in tree_leaves(value)]


def _shapes(result: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
