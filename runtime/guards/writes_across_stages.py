"""State shared by stages: a step of one stage may not change state that code of another reads.

    count[0] += 1     x * count[0]       in one process the second would see the first's write: refused
    norms[name] = g.norm()               read by the loop alone: each rank has its part of it

Places are compared from the start of a step to after its backwards, whatever wrote them: forwards, backwards or hooks.
Their readers are found in code, see `names_read_by_code`. Where no state is shared, nothing is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..blocks.shape_inference import HAND_ON
from ..user_objects.host_value_equality import GONE, numbers_of
from ..user_objects.object_contents import OF_TORCH, ClosureCells, Entries, HolderPlaces, Items, OfClass, Trained, Whole
from ..user_objects.snapshot import Snapshot, is_same
from .names_read_by_code import CodeReads, memory_of

Judged = Collection[tuple[int, str | int | None]]


class CodeOnStage(NamedTuple):
    """Block or function that runs on a stage, and the names that its code reads."""

    name: str
    stage: int
    reads: CodeReads
    is_block: bool = True


class _Spot(NamedTuple):
    """Watched place or container: a function that reads it, and the names of its writer and reader."""

    name: str
    read: Callable[[], Any]
    writer: str
    reader: str
    may_grow: bool = True
    """Whether entries may be added to it: its reader makes missing ones itself, as for a cache."""


class CommonState:
    """State that code on this rank may change and code of other stages reads.

    Args:
        own: blocks and functions that run here, with their snapshots.
        others: blocks and functions of all stages.
        judged: (holder id, key or None): places that forwards are known to pass on to no other stage.
        between: tensors that code between the layers of a model reads.

    Attributes:
        spots: the watched places.
    """

    def __init__(
        self,
        own: Iterable[tuple[CodeOnStage, Snapshot]],
        others: Iterable[CodeOnStage],
        judged: Judged,
        between: Iterable[Tensor] = (),
    ) -> None:
        self._judged, self._others = judged, list(others)
        self.spots = [spot for one, held in own for spot in self._spots_of(one, held)]
        words = "a tensor of the model's", "a layer", "code between layers"
        self.spots += [_Spot(words[0], partial(self._state_of, tensor), *words[1:]) for tensor in between]
        self._before: list[Any] = []
        self._num_steps, self._why = 0, ""

    def begin_step(self) -> None:
        """Record the places' values before a step."""
        self._num_steps += 1
        self._before = [spot.read() for spot in self.spots]

    def why_changed(self) -> str:
        """Return the reason for a change since, in this step or after the last check; "": nothing has changed."""
        for spot, was in zip(self.spots, self._before, strict=True) if not self._why else ():
            if not _is_kept(was, spot.read(), may_grow=spot.may_grow):
                self._why = (
                    f"{spot.writer}, or what runs on its stage, sets {spot.name!r} in a forward, backward or hook, and "
                    f"{spot.reader} reads it on another stage, where it is as it was; {HAND_ON}"
                )
                break
        return self._why

    def _spots_of(self, one: CodeOnStage, snapshot: Snapshot) -> Iterator[_Spot]:
        others = [other for other in self._others if other.stage != one.stage]
        if not others:
            return
        for name, tensor in snapshot.tensors():
            if not isinstance(tensor, nn.Parameter) and (reader := self._reader_of(others, memory_of(tensor))):
                yield _Spot(name.lstrip(" ."), partial(self._state_of, tensor), one.name, reader.name)
        for name, space in snapshot.spaces():
            if isinstance(space, Whole) or space.form == "[{}]":
                if reader := self._reader_of(others, id(space.holder)):
                    read, may_grow = partial(_content_of, space), not reader.reads.awaits_entries(id(space.holder))
                    yield _Spot(name.lstrip(" ."), read, one.name, reader.name, may_grow)
            elif not isinstance(space, Trained):
                yield from self._places_in(name, space, one, others)

    def _reader_of(self, others: Iterable[CodeOnStage], token: int) -> CodeOnStage | None:
        """Return a block or function that may read a container or tensor, preferably one that waits for entries."""
        if (token, None) in self._judged:
            others = (other for other in others if not other.is_block)
        found = [other for other in others if other.reads.reads_into(token)]
        return max(found, key=lambda other: other.reads.awaits_entries(token), default=None)

    def _state_of(self, tensor: Tensor) -> Mapping[Any, Any]:
        """Return a tensor's version; in the first step a digest too, as writes through `.data` are not counted."""
        return {"": tensor._version, "numbers": numbers_of(tensor) if self._num_steps == 1 else None}

    def _places_in(
        self, name: str, space: HolderPlaces, one: CodeOnStage, others: Sequence[CodeOnStage]
    ) -> Iterator[_Spot]:
        """Yield the places of a holder that code here sets, and code of another stage reads."""
        keys = one.reads.stored - OF_TORCH if space.form == ".{}" and type(space) is Entries else set(space.keys())
        for key in sorted(keys & one.reads.stored):
            token = id(space.cells[key] if isinstance(space, ClosureCells) else space.holder)
            blocks = (token, key) not in self._judged
            readers = (
                o for o in others if key in o.reads.names and token in o.reads.held and (blocks or not o.is_block)
            )
            if (reader := next(readers, None)) is not None:
                said = space.label(name, key) if isinstance(space, OfClass) else key
                yield _Spot(said, partial(_place_of, space.reader(key)), one.name, reader.name)


def _is_kept(was: Mapping[Any, Any] | Sequence[Any], now: Mapping[Any, Any] | Sequence[Any], *, may_grow: bool) -> bool:
    """Return whether all values are as they were; `may_grow`: entries may be added, as to a cache."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        return (may_grow or len(was) == len(now)) and all(
            value is None or is_same(value, now.get(key, GONE)) for key, value in was.items()
        )
    return len(was) == len(now) and all(map(is_same, was, now))


def _content_of(space: HolderPlaces) -> Mapping[Any, Any] | Sequence[Any]:
    return dict(space.read_values()) if not isinstance(space, Items) else tuple(space.holder)


def _place_of(read: Callable[[], Any]) -> Mapping[Any, Any]:
    found = read()
    return {} if found is GONE else {"": found}
