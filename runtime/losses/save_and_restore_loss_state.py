"""State of a user's function: saved and restored around experiments, and compared between steps.

module, object, bound method     attributes, and what is in them           ┐ restored after an experiment, with
function                         cells of its closure, globals it names    ┘ the global generators
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from ..blocks.without_side_effects import StateCopy
from ..comm.random_generators import AllGenerators
from ..user_objects.host_state import HostState
from ..user_objects.snapshot import Snapshot

_LARGEST_ID = 10**7
_MOST_NUMBERS = 32


class FunctionKept(StateCopy):
    """Saved state of a function: objects it holds and names, and the global generators of the host and its `device`.

    Weights that an engine trains are left out: what is gathered or stepped meanwhile has to stay.
    """

    def __init__(self, function: Any, device: torch.device) -> None:
        super().__init__(_bare(function))
        self.device, self._generators = device, AllGenerators(device)

    def _held_by(self, root: Any) -> list[nn.Parameter]:
        return [weight for weight in super()._held_by(root) if not hasattr(weight, "_quintsched_sum")]

    def put_back(self) -> None:
        """Restore the function's state and the generators."""
        super().put_back()
        self._generators.put_back()

    def have_drawn(self) -> bool:
        """Return whether a generator has moved."""
        return self._generators.have_moved()


def versions_kept(function: Any) -> AbstractContextManager[Any]:
    """Context that restores the version counters of a function's tensors, for graphs that have saved these.

    Their numbers have to be restored as well.
    """
    known = tuple(tensor for tensor in _tensors(function) if not tensor.is_inference())
    return _unsafe_preserve_version_counter(known) if known else nullcontext()


class FunctionState:
    """Host state that a function reads besides its arguments, recorded now: a loop may change it between steps.

    Args:
        function: the function.
        name: its name in messages.
    """

    def __init__(self, function: Any, name: str = "the loss") -> None:
        self._name, self._state = name, HostState({}, {name: _bare(function)})
        self._tensors = [(tensor, tensor._version) for tensor in self._state.tensors() if not tensor.is_inference()]
        self._state.let_go()

    def changed(self) -> str | None:
        """Return the name of a changed place; None where none has changed.

        Hooks of modules are left out: they come and go in the first step, which watches these.
        """
        if any(tensor._version != version for tensor, version in self._tensors):
            return f"a tensor that {self._name} goes by"
        return next((place.name for place in self.moved()), None)

    def tensors_moved(self) -> list[Tensor]:
        """Return the tensors that were changed in place."""
        return [tensor for tensor, version in self._tensors if tensor._version != version]

    def moved(self) -> list[Any]:
        """Return the changed places, see `HostState`."""
        return [*self._state.moved(hooks=False)]

    def written(self) -> set[str]:
        """Return keys of the changed places and tensors: names, and ids as strings."""
        return {*map(name_of, self.moved()), *(str(id(tensor)) for tensor in self.tensors_moved())}


def name_of(place: Any) -> str:
    """Return the name of a place, or of the container that it is in."""
    name: str = place.name
    return name.partition("[")[0]


def class_weights(function: Any) -> list[Tensor]:
    """Return the 1-dimensional float tensors that a function reaches, which may be class weights, in a fixed order.

    Trained ones belong to a model that it holds, and are left out; so are those whose memory is freed for the time,
    such as that model's gradients under ZeRO.
    """
    rows = [t for t in _tensors(function) if t.dim() == 1 and t.is_floating_point() and len(t) > 1]
    return [row for row in rows if not row.requires_grad and not row.is_meta and row.untyped_storage().nbytes()]


def tensors_with_rows(name: str, function: Any, sizes: Collection[int]) -> list[str]:
    """Return names and shapes of tensors that a function, called `name`, reaches, whose row count is in `sizes`."""
    found = Snapshot({name: _bare(function)}, numbers=False).tensors()
    return [f"{words} {tuple(t.shape)}" for words, t in found if t.dim() and t.shape[0] in sizes]


def whole_numbers(function: Any) -> list[int]:
    """Return some integers that a function holds, names or has in its code."""
    reached = reached_by(_bare(function))
    found = [*(one for function in reached.functions() for one in function.__code__.co_consts), *reached.plain]
    ints = [int(one) for one in found if isinstance(one, int) and not isinstance(one, bool)]  # also such as IntEnum
    numbers = [one for one in dict.fromkeys(ints) if abs(one) < _LARGEST_ID and one not in (0, 1, -1, -100)]
    return list(dict.fromkeys([*numbers[:_MOST_NUMBERS], 0]))


def reached_by(root: Any) -> Snapshot:
    """Return all objects reachable from a root, those of libraries and their contents included."""
    return Snapshot({"": root}, numbers=False, of_libraries=True)


def _tensors(function: Any) -> list[Tensor]:
    return [thing for thing in reached_by(_bare(function)).values() if isinstance(thing, Tensor)]


def _bare(function: Any) -> Any:
    """Return a function without the partials that bind one for cut logits to ranks."""
    while isinstance(function, partial) and "vocabulary" in function.keywords:
        function = function.func
    return function
