"""Followed through a run of a whole block: of which rank's features each number is made, between columns and rows.

    fc1 ─▶ 1 1 2 2 ─▶ gelu ─▶ 1 1 2 2 ─▶ fc2 ─▶ 0 0 0 0      apart: each rank can compute its own
           1 1 2 2 ─▶ norm ─▶ 1 and 2                        joined: no pair, by function and line

Numbers agree at the points that are tried; which features meet in a function holds at all points. Each memory with
features has a shadow, a byte for each number: 0, or 1 + the rank. Views share memory, and so the shadow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...job.choices import TensorSplit
from ..tensor.cuts import Cut, sizes_of
from ..tensor.pairs import wide_norms
from ..tensor.shard import Shard
from .owner_rules import HOST, Joined, Unknown, owners_of_results, require_one

_PASSED = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/")
_HOST_METHODS = {"tolist", "numpy", "data_ptr", "untyped_storage", "storage"}
_HOST_PROTOCOLS = {"__array__", "__dlpack__"}


class FeatureOwners(TorchDispatchMode):
    """Within it, features are followed; `Joined` is raised where they meet, or where numbers steer Python.

    `trusts`: functions that nobody knows are taken to keep them apart, as somebody says by a rule.
    """

    def __init__(self, *, trusts: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trusts = trusts
        self._shadows: dict[int, tuple[torch.UntypedStorage, int, Tensor]] = {}
        self._known = 0
        """How many calls deep it is in what takes features of all ranks, or in the bookkeeping."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if self._known:
            return func(*args, **given)
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        is_owned = any(_key(tensor) in self._shadows for tensor in tensors)
        name = func._schema.name.removeprefix("aten::")
        if name in HOST and (is_owned or HOST[name]):
            raise Joined(f"reads numbers on the host ({name.strip('_')}{_line()}), by which it may do something else")
        result = func(*args, **given)
        if is_owned:
            try:
                for tensor, owners in owners_of_results(func, args, given, result, self.of):
                    self.note(tensor, owners)
            except Joined as why:
                if not (self._trusts and isinstance(why, Unknown)):
                    raise Joined(f"{why}{_line()}") from None
        return result

    def of(self, tensor: Tensor) -> Tensor:
        """Return the owners of a tensor's numbers, int8 of its shape."""
        found = self._shadows.get(_key(tensor))
        if found is None:
            return torch.zeros(tensor.shape, dtype=torch.int8, device=tensor.device)
        _, unit, shadow = found
        return _window(tensor, unit, shadow)

    def note(self, tensor: Tensor, owners: Tensor) -> None:
        """Note the owners of a tensor's numbers."""
        storage = tensor.untyped_storage()
        if _key(tensor) not in self._shadows:
            if not owners.any():
                return
            unit = _unit(tensor)
            shadow = torch.zeros(max(storage.nbytes() // unit, 1), dtype=torch.int8, device=tensor.device)
            self._shadows[_key(tensor)] = (storage, unit, shadow)
        _, unit, shadow = self._shadows[_key(tensor)]
        if tensor.is_complex():
            owners = owners[..., None].expand(*owners.shape, 2)
        _places(tensor, unit, shadow).copy_(owners.expand_as(_places(tensor, unit, shadow)))

    @contextmanager
    def through_pairs(self, cuts: Sequence[Cut], size: int) -> Iterator[None]:
        """A context in which columns give features to ranks, and rows and norms of the whole width take them."""
        handles = []
        for cut in cuts:
            if cut.is_paired and cut.split is TensorSplit.COLUMN:
                layout = _layout(cut, size)
                handles.append(cut.layer.register_forward_hook(self._giving(layout)))
            elif cut.is_paired and cut.split is TensorSplit.ROW:
                handles += self._taking(cut.layer, _contiguous(sizes_of(cut.layer)[0], size), None)
        for module, width in wide_norms(cuts):
            handles += self._taking(module, _contiguous(width, size), width)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _giving(self, layout: Tensor) -> Callable[[nn.Module, Any, Tensor], None]:
        def give(module: nn.Module, args: Any, result: Tensor) -> None:
            self._known += 1
            self.note(result, layout.to(result.device))
            self._known -= 1

        return give

    def _taking(self, module: nn.Module, layout: Tensor, width: int | None) -> list[Any]:
        """Let a module take features that lie in order; one of so large a `width` also gives them so."""

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0] if args else None
            if isinstance(x, Tensor) and x.shape[-1] == len(layout):
                self._known += 1
                owners = self.of(x)
                if bool(((owners != 0) & (owners != layout.to(x.device))).any()):
                    raise Joined(f"gives {type(module).__name__} features in another order{_line()}")

        def behind(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            x = args[0] if args else None
            if isinstance(x, Tensor) and x.shape[-1] == len(layout):
                if width is not None and isinstance(result, Tensor) and bool(self.of(x).any()):
                    self.note(result, layout.to(result.device))
                self._known -= 1

        return [module.register_forward_pre_hook(before), module.register_forward_hook(behind)]

    def require_none(self, result: object) -> None:
        """Raise `Joined` where features leave the block as they are cut."""
        if any(bool(self.of(leaf).any()) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            raise Joined("gives features that are cut to other blocks")


class HostReads(TorchFunctionMode):
    """Within it, `Joined` is raised where Python is given the numbers of a tensor by no function of torch."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        is_users = name in _HOST_METHODS and not sys._getframe(1).f_code.co_filename.startswith(_PASSED)
        if is_users or name in _HOST_PROTOCOLS:
            raise Joined(f"reads numbers on the host ({name}{_line()}), by which it may do something else")
        return func(*args, **(kwargs or {}))


def _layout(cut: Cut, size: int) -> Tensor:
    """Return the owner of each of a column's features."""
    total = sizes_of(cut.layer)[1]
    owners = torch.zeros(total, dtype=torch.int8)
    for rank in range(size):
        for places in Shard(0, cut.parts, rank, size).places(total):
            owners[places] = 1 + rank
    return owners


def _contiguous(total: int, size: int) -> Tensor:
    return torch.arange(1, size + 1, dtype=torch.int8).repeat_interleave(total // size)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _unit(tensor: Tensor) -> int:
    return tensor.element_size() // (2 if tensor.is_complex() else 1)


def _places(tensor: Tensor, unit: int, shadow: Tensor) -> Tensor:
    """Return the places of a tensor's numbers in a shadow; of complex ones two each, in a last dimension."""
    if _unit(tensor) != unit:
        raise Joined("reads the bytes of features as another type")
    if not tensor.is_complex():
        return shadow.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    strides = (*(2 * stride for stride in tensor.stride()), 1)
    return shadow.as_strided((*tensor.shape, 2), strides, 2 * tensor.storage_offset())


def _window(tensor: Tensor, unit: int, shadow: Tensor) -> Tensor:
    found = _places(tensor, unit, shadow)
    return require_one(found, [found.dim() - 1], keeps=False) if tensor.is_complex() else found.clone()


def _line() -> str:
    """Return the line of a user's code, or of a library of models, that runs now."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return f" in line {frame.f_lineno} of {Path(frame.f_code.co_filename).name}"
