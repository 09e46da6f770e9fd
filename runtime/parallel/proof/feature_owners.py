"""Followed through a run of a whole block: of which rank's features each number is made, between columns and rows.

    fc1 ─▶ 1 1 2 2 ─▶ gelu ─▶ 1 1 2 2 ─▶ fc2 ─▶ 0 0 0 0      apart: each rank can compute its own
           1 1 2 2 ─▶ norm ─▶ 1 and 2                        joined: no pair, by function and line

Numbers agree at the points that are tried; which features meet in a function holds at all points. Each memory with
features has a shadow, a byte for each number: 0, or 1 + the rank. Views share memory, and so the shadow.

Which layers' weights a block gives to functions itself: of one that is cut, a rank would give its shard alone.

self.fc1(x)                      the layer's own forward, which knows how it is cut
self.fc1.weight.abs().max()      a shard's, so that the layer is kept whole
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...settings.tensor_rules import TensorSplit
from ..draws import BY_DEVICE, KEYED
from ..tensor.cuts import Cut, sizes_of
from ..tensor.pairs import wide_norms
from ..tensor.shard import Shard
from .marks.labels import Shadows, key_of
from .marks.owner_rules import COUNTS, Joined, Unknown, goes_by_data, owners_of_results, tells_numbers

_PASSED = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[2]}/")
_HOST_METHODS = {"tolist", "numpy", "data_ptr", "untyped_storage", "storage"}
_HOST_PROTOCOLS = {"__array__", "__dlpack__", "__reduce_ex__", "__repr__"}
_PICKLED = "_typed_storage"
"""Torch's function that pickles and files get numbers by."""

Place = tuple[tuple[str, int], ...]
"""The innermost lines of users' code and of libraries of models that run."""


class FeatureOwners(TorchDispatchMode):
    """Within it, features are followed; `Joined` is raised where they meet, or where numbers steer Python.

    Args:
        trusts: functions that nobody knows are taken to keep them apart, as somebody says by a rule.
        flipped: where conditions on numbers are taken to be otherwise.

    Attributes:
        conditions: where Python asked whether numbers are so, outside of torch.
        reads: how often it was given others.
    """

    def __init__(self, *, trusts: bool, flipped: Set[Place] = frozenset()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trusts, self._flipped = trusts, flipped
        self.conditions: dict[Place, None] = {}
        self.reads = 0
        self._scopes = self._num_answers = 0
        self._shadows = Shadows(torch.int8)
        self._known = 0
        """How many calls deep it is in what takes features of all ranks, or in the bookkeeping."""

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
        """Hear of a call, of numbers that are followed or not."""
        if is_owned:
            self._follow(func, args, given, result)

    def _note_draws(self, func: Any, args: Any, given: Mapping[str, Any], drawn: Any) -> None:
        """Note what is drawn; of features that are cut, whole and cut are compared (`cut_sizes`)."""

    def _see(self, name: str, tensor: Tensor) -> None:
        """Raise `Joined`, as Python sees numbers that are followed."""
        raise _read_by(name)

    def _follow(self, func: Any, args: Any, given: Mapping[str, Any], result: Any) -> None:
        """Note the owners of what a function gave or changed."""
        try:
            for tensor, owners in owners_of_results(func, args, given, result, self.of):
                self.note(tensor, owners)
        except Joined as why:
            if not (self._trusts and isinstance(why, Unknown)):
                raise Joined(f"{why}{line()}") from None

    def _read(self, number: object, tensor: Tensor, *, is_owned: bool) -> object:
        """Return what Python is given of a number; raises `Joined` for one that may steer a pair."""
        if isinstance(number, bool):
            return self._decide(number)
        if self._scopes or not isinstance(number, int):
            raise _read_by("item")
        self.reads += 1
        return number

    def _decide(self, number: bool) -> bool:
        """Note where Python asks whether numbers are so, and return what it is told."""
        self.conditions[here := place()] = None
        if here not in self._flipped:
            return number
        self._num_answers += 1
        if self._num_answers > _MOST_ANSWERS:  # `while x.max() > 20` would never end
            raise Joined(f"goes on for as long as numbers are so{line()}, by which it may do something else")
        return not number

    def known(self, tensor: Tensor) -> Tensor | None:
        """Return the owners of a tensor's numbers where there may be some."""
        return self.of(tensor) if key_of(tensor) in self._shadows else None

    def of(self, tensor: Tensor) -> Tensor:
        """Return the owners of a tensor's numbers, int8 of its shape."""
        found = self._shadows.of(tensor)
        return torch.zeros(tensor.shape, dtype=torch.int8, device=tensor.device) if found is None else found

    def note(self, tensor: Tensor, owners: Tensor) -> None:
        """Note the owners of a tensor's numbers."""
        if key_of(tensor) in self._shadows or owners.any():
            self._shadows.note(tensor, owners)

    @contextmanager
    def unfollowed(self) -> Iterator[None]:
        """A context for what is known: nothing is followed."""
        self._known += 1
        try:
            yield
        finally:
            self._known -= 1

    @contextmanager
    def through_pairs(self, cuts: Sequence[Cut], size: int) -> Iterator[None]:
        """A context in which columns give features to ranks, and rows and norms of the whole width take them."""
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
            self.note(result, layout.to(result.device))
            self._known -= 1

        return give

    def _take(self, hooks: ExitStack, module: nn.Module, layout: Tensor, width: int | None) -> None:
        """Let a module take features that lie in order; one of so large a `width` also gives them so."""

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0] if args else None
            if isinstance(x, Tensor) and x.shape[-1] == len(layout):
                self._known += 1
                owners = self.of(x)
                if bool(((owners != 0) & (owners != layout.to(x.device))).any()):
                    raise Joined(f"gives {type(module).__name__} features in another order{line()}")

        def behind(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            x = args[0] if args else None
            if isinstance(x, Tensor) and x.shape[-1] == len(layout):
                if width is not None and isinstance(result, Tensor) and bool(self.of(x).any()):
                    self.note(result, layout.to(result.device))
                self._known -= 1

        hooks.enter_context(module.register_forward_pre_hook(before))
        hooks.enter_context(module.register_forward_hook(behind))

    def require_none(self, result: object) -> None:
        """Raise `Joined` where features leave the block as they are cut."""
        if any(bool(self.of(leaf).any()) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            raise Joined("gives features that are cut to other blocks")


class HostReads(TorchFunctionMode):
    """Within it, `Joined` is raised where Python is given the numbers of a tensor by no function of torch.

    So it is where code is to be given the gradient of features that `owners` follow.
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
    """Within it, functions of dropout do what they do where all stays: their masks are keyed (see `parallel.draws`)."""

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
"""So often a run is told that conditions are otherwise."""


def place() -> Place:
    """Return where users' code runs now."""
    found = (frame for frame in walk_stack(sys._getframe(1)) if not frame[0].f_code.co_filename.startswith(_PASSED))
    return tuple((frame.f_code.co_filename, line) for frame, line in islice(found, _FRAMES))


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


def line() -> str:
    """Return the line of a user's code, or of a library of models, that runs now."""
    return "".join(f" in line {line} of {Path(file).name}" for file, line in place()[:1])


_ALIKE = {
    "dtype", "device", "layout", "requires_grad", "grad_fn", "is_leaf", "is_cuda", "is_cpu", "is_meta", "is_sparse",
    "is_quantized", "is_floating_point", "is_complex", "get_device", "element_size", "itemsize",
    "dim", "ndim", "shape", "size", "numel", "nelement", "__len__", "__hash__",
}  # fmt: skip
"""What may be asked of a shard, too: sizes are those of a run that is compared."""


class WeightReads(TorchFunctionMode):
    """Within it, the functions are noted that are given weights of layers outside of the layers' own forwards.

    Args:
        layers: by name.

    Attributes:
        found: the name of a layer to the first function that is given its weights, in words: "gives …".
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._layers = layers
        self._paths = {id(parameter): path for path, layer in layers.items() for parameter in layer.parameters()}
        self._inside = 0
        self.found: dict[str, str] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which forwards are run, of which those of the layers are their own business."""
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
            for leaf in tree_leaves((args, kwargs)):
                if (path := self._paths.get(id(leaf))) is not None:
                    self.found.setdefault(path, f"gives the weights of {path!r} to {name}{line()}")
        return func(*args, **(kwargs or {}))
