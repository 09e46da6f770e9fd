"""Taint tracking of features between columns and rows, in a run of a whole block: the owner rank of each element.

    fc1 ─▶ 1 1 2 2 ─▶ gelu ─▶ 1 1 2 2 ─▶ fc2 ─▶ 0 0 0 0      apart: each rank can compute its own
           1 1 2 2 ─▶ norm ─▶ 1 and 2                        joined: no pair, reported by function and line

A comparison of numbers holds for the inputs tried; the features that an operator combines are the same for all inputs.
Each storage with features has a shadow memory, a byte per element: 0, or 1 + the rank. Views share storage and shadow.

`WeightReads` finds layers whose weights a block passes to functions itself: a rank of a cut layer has only a shard.

self.fc1(x)                      the layer's own forward, which is aware of the cut
self.fc1.weight.abs().max()      would read a shard, so the layer is kept whole
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from pathlib import Path
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...settings.tensor_parallel_rules import TensorSplit
from ...user_objects.find_impure_code import unrecorded
from ..seeded_block_draws import BY_DEVICE, KEYED
from ..tensor.adjust_modules_around_pairs import wide_norms
from ..tensor.cuttable_layers import Cut, sizes_of
from ..tensor.parameter_shards import TpShard
from .marks.operator_rules_for_taint import (
    COUNTS,
    Joined,
    JoinedAt,
    Unknown,
    goes_by_data,
    owners_of_results,
    tells_numbers,
)
from .marks.value_numbers_of_elements import Shadows, key_of

_PASSED = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/")
_HOST_METHODS = {"tolist", "numpy", "data_ptr", "untyped_storage", "storage"}
_HOST_PROTOCOLS = {"__array__", "__dlpack__", "__reduce_ex__", "__repr__"}
_PICKLED = "_typed_storage"
"""Torch's function by which pickling and saving read numbers."""

CodePlace = tuple[tuple[str, int], ...]
"""Innermost stack frames (file, line) of user code and model libraries."""


class FeatureOwners(TorchDispatchMode):
    """Dispatch mode that tracks the owners of features; raises `Joined` where they meet, or Python depends on numbers.

    Args:
        trusts: unknown operators are taken to keep features apart, as a user's rule demands the cut.
        flipped: places at which conditions on numbers are negated.

    Attributes:
        conditions: places at which Python read a bool from a tensor.
        reads: number of ints that Python read from tensors.
    """

    def __init__(self, *, trusts: bool, flipped: Set[CodePlace] = frozenset()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trusts, self._flipped = trusts, flipped
        self.conditions: dict[CodePlace, None] = {}
        self.reads = 0
        self._scopes = self._num_answers = 0
        self._shadows = Shadows(torch.int8)
        self._known = 0
        """Nesting depth of calls that are not tracked: modules that take features of all ranks, and bookkeeping."""

    @unrecorded
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if self._known:
            return func(*args, **given)
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        is_owned = any(key_of(tensor) in self._shadows for tensor in tensors)
        name = func._schema.name.removeprefix("aten::")
        tells = tells_numbers(func)
        if is_owned and (tells or name in COUNTS):
            self._see(name, args[0])
        if self._scopes and goes_by_data(func, tensors):
            raise Joined(f"has as many numbers as data decide{line()}, by which it may do something else")
        result = func(*args, **given)
        if tells:
            return self._read(result, args[0], is_owned=is_owned)
        self._hear(func, args, given, result, is_owned=is_owned)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._note_draws(func, args, given, result)
        return result

    def _hear(self, func: Any, args: Any, given: Mapping[str, Any], result: Any, *, is_owned: bool) -> None:
        """Process a call; `is_owned`: some argument is tracked."""
        if is_owned:
            self._follow(func, args, given, result)

    def _note_draws(self, func: Any, args: Any, given: Mapping[str, Any], drawn: Any) -> None:
        """Record a random draw: nothing here, as `compare_whole_and_cut_calls` compares draws, whole and cut."""

    def _see(self, name: str, tensor: Tensor) -> None:
        """Raise `Joined`: Python is about to read tracked numbers."""
        raise _read_by(name)

    def _follow(self, func: Any, args: Any, given: Mapping[str, Any], result: Any) -> None:
        """Propagate owners through a call, to its results and mutated arguments."""
        try:
            for tensor, owners in owners_of_results(func, args, given, result, self.owners_of):
                self.set_owners(tensor, owners)
        except Joined as why:
            if not (self._trusts and isinstance(why, Unknown)):
                raise JoinedAt(f"{why}{line()}") from None

    def _read(self, number: object, tensor: Tensor, *, is_owned: bool) -> object:
        """Return the number that Python reads from a tensor; raises `Joined` if a pair may depend on it."""
        if isinstance(number, bool):
            return self._decide(number)
        if self._scopes or not isinstance(number, int):
            raise _read_by("item")
        self.reads += 1
        return number

    def _decide(self, number: bool) -> bool:
        """Record the place at which Python reads a bool, and return it, negated at `flipped` places."""
        self.conditions[here := place()] = None
        if here not in self._flipped:
            return number
        self._num_answers += 1
        if self._num_answers > _MOST_ANSWERS:  # `while x.max() > 20` would never end
            raise Joined(f"goes on for as long as numbers are so{line()}, by which it may do something else")
        return not number

    def known(self, tensor: Tensor) -> Tensor | None:
        """Return the owners of a tensor's elements, or None if its storage is not tracked."""
        return self.owners_of(tensor) if key_of(tensor) in self._shadows else None

    def owners_of(self, tensor: Tensor) -> Tensor:
        """Return the owners of a tensor's elements, int8 of its shape; 0 without an owner."""
        found = self._shadows.marks_of(tensor)
        return torch.zeros(tensor.shape, dtype=torch.int8, device=tensor.device) if found is None else found

    def set_owners(self, tensor: Tensor, owners: Tensor) -> None:
        """Set the owners of a tensor's elements."""
        if key_of(tensor) in self._shadows or owners.any():
            self._shadows.set_marks(tensor, owners)

    @contextmanager
    def unfollowed(self) -> Iterator[None]:
        """Context in which nothing is tracked."""
        self._known += 1
        try:
            yield
        finally:
            self._known -= 1

    @contextmanager
    def through_pairs(self, cuts: Sequence[Cut], size: int) -> Iterator[None]:
        """Context in which columns assign features to ranks, and rows and norms of the whole width consume them."""
        with ExitStack() as hooks:
            for scope in {id(cut.pair): cut.pair for cut in cuts if cut.is_paired and cut.pair is not None}.values():
                for module in scope.modules():
                    if module is not scope and (module._backward_hooks or module._backward_pre_hooks):
                        kind = type(module).__name__
                        raise Joined(f"has a hook on the gradient of {kind}, which may be a rank's alone")
                hooks.enter_context(scope.register_forward_pre_hook(self._enter, with_kwargs=True))
                hooks.enter_context(scope.register_forward_hook(self._leave))
            for cut in cuts:
                if cut.is_paired and cut.split is TensorSplit.COLUMN:
                    hooks.enter_context(cut.layer.register_forward_hook(self._giving(_layout(cut, size))))
                elif cut.is_paired and cut.split is TensorSplit.ROW:
                    self._take(hooks, cut.layer, _contiguous(sizes_of(cut.layer)[0], size), None)
            for module, width in wide_norms(cuts):
                self._take(hooks, module, _contiguous(width, size), width)
            yield

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.reads and any(type(leaf) in (int, float) for leaf in tree_leaves((args, kwargs))):
            raise Joined(f"reads numbers on the host, and gives {type(module).__name__} a number that may be one")
        self._scopes += 1

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._scopes -= 1

    def _giving(self, layout: Tensor) -> Callable[[nn.Module, Any, Tensor], None]:
        def give(module: nn.Module, args: Any, result: Tensor) -> None:
            self._known += 1
            self.set_owners(result, layout.to(result.device))
            self._known -= 1

        return give

    def _take(self, hooks: ExitStack, module: nn.Module, layout: Tensor, width: int | None) -> None:
        """Register hooks on a module that takes features in rank order; a norm of this `width` also returns them so."""

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0] if args else None
            if isinstance(x, Tensor) and x.shape[-1] == len(layout):
                self._known += 1
                owners = self.owners_of(x)
                if bool(((owners != 0) & (owners != layout.to(x.device))).any()):
                    raise Joined(f"gives {type(module).__name__} features in another order{line()}")

        def behind(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            x = args[0] if args else None
            if isinstance(x, Tensor) and x.shape[-1] == len(layout):
                if width is not None and isinstance(result, Tensor) and bool(self.owners_of(x).any()):
                    self.set_owners(result, layout.to(result.device))
                self._known -= 1

        hooks.enter_context(module.register_forward_pre_hook(before))
        hooks.enter_context(module.register_forward_hook(behind))

    def require_none(self, result: object) -> None:
        """Raise `Joined` if sharded features leave the block in its result."""
        if any(bool(self.owners_of(leaf).any()) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            raise Joined("gives features that are cut to other blocks")


class HostReads(TorchFunctionMode):
    """Torch function mode that raises `Joined` if Python reads a tensor's numbers past the dispatcher (`tolist`, …).

    So it does if code registers a gradient hook on features that `owners` tracks.
    """

    def __init__(self, owners: FeatureOwners) -> None:
        super().__init__()
        self._owners = owners

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        code = sys._getframe(1).f_code
        is_users = not code.co_filename.startswith(_PASSED) or code.co_name == _PICKLED
        if (name in _HOST_METHODS and is_users) or name in _HOST_PROTOCOLS:
            raise _read_by(name)
        if name == "register_hook" and self._owners.known(args[0]) is not None:
            raise Joined(f"registers a hook on features{line()}, which is given the gradient of those of a rank")
        return func(*args, **(kwargs or {}))


class NothingDropped(TorchFunctionMode):
    """Torch function mode in which dropout functions keep all elements; masks are keyed (`seeded_block_draws`)."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        keyed, given = KEYED.get(getattr(func, "__name__", "")), kwargs or {}
        made = keyed(_all_stay, *args, **given) if keyed is not None else None
        return func(*args, **given) if made is None or made is BY_DEVICE else made


def _all_stay(shape: Sequence[int], p: float) -> Tensor:
    return torch.ones(tuple(shape), dtype=torch.bool)


def _read_by(name: str) -> Joined:
    return Joined(f"reads numbers on the host ({name.strip('_')}{line()}), by which it may do something else")


_FRAMES = 4
_MOST_ANSWERS = 1000
"""Maximum number of negated conditions in a run."""


def place() -> CodePlace:
    """Return the innermost stack frames of user code."""
    found = (frame for frame in walk_stack(sys._getframe(1)) if not frame[0].f_code.co_filename.startswith(_PASSED))
    return tuple((frame.f_code.co_filename, line) for frame, line in islice(found, _FRAMES))


def _layout(cut: Cut, size: int) -> Tensor:
    """Return the owner of each output feature of a column, int8 (out,)."""
    total = sizes_of(cut.layer)[1]
    owners = torch.zeros(total, dtype=torch.int8)
    for rank in range(size):
        for places in TpShard(0, cut.parts, rank, size).places(total):
            owners[places] = 1 + rank
    return owners


def _contiguous(total: int, size: int) -> Tensor:
    return torch.arange(1, size + 1, dtype=torch.int8).repeat_interleave(total // size)


def line() -> str:
    """Return the current line of user code or of a model library, as words for a message."""
    return "".join(f" in line {line} of {Path(file).name}" for file, line in place()[:1])


_ALIKE = {
    "dtype", "device", "layout", "requires_grad", "grad_fn", "is_leaf", "is_cuda", "is_cpu", "is_meta", "is_sparse",
    "is_quantized", "is_floating_point", "is_complex", "get_device", "element_size", "itemsize",
    "dim", "ndim", "shape", "size", "numel", "nelement", "__len__", "__hash__",
}  # fmt: skip
"""Attributes that may be read from a shard, too: calls that depend on sizes are compared in other runs."""


class WeightReads(TorchFunctionMode):
    """Torch function mode that records functions called on weights of layers outside of the layers' own forwards.

    Args:
        layers: by name.

    Attributes:
        found: the name of a layer to the first function that was called on its weights, in words: "gives …".
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._layers = layers
        self._paths = {id(parameter): path for path, layer in layers.items() for parameter in layer.parameters()}
        self._inside = 0
        self.found: dict[str, str] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context for forwards of a block; calls within the forwards of the layers are not recorded."""
        with ExitStack() as hooks:
            for layer in self._layers.values():
                hooks.enter_context(layer.register_forward_pre_hook(self._enter))
                hooks.enter_context(layer.register_forward_hook(self._leave, always_call=True))
            with self:
                yield

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside += 1

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._inside -= 1

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        name = getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name
        if not self._inside and name not in _ALIKE:
            given = (*args, *(kwargs or {}).values())
            for leaf in chain(*(tree_leaves(one) if isinstance(one, list | tuple) else (one,) for one in given)):
                if (path := self._paths.get(id(leaf))) is not None:
                    self.found.setdefault(path, f"gives the weights of {path!r} to {name}{line()}")
        return func(*args, **(kwargs or {}))
