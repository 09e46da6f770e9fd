"""State that stages have in common: what code of one reads, a step of another may not change.

    count[0] += 1     x * count[0]       in one process the second would see what the first writes: refused
    norms[name] = g.norm()               read by the loop alone: each rank has its part of it

Places are looked at as a step begins and behind its backwards, whoever writes: forwards, backwards or hooks. Who reads
them is told by code, see `code_reads`. Where nothing is in common, nothing is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...blocks.shapes import HAND_ON
from ...objects.host_values import GONE, numbers_of
from ...objects.snapshot import Snapshot, is_same
from ...objects.spaces import OF_TORCH, Cells, Entries, Items, OfClass, Space, Trained, Whole
from .code_reads import CodeReads, memory_of

Judged = Collection[tuple[int, str | int | None]]


class Runs(NamedTuple):
    """Something that runs on a stage, a block or a function, and what its code reads."""

    name: str
    stage: int
    reads: CodeReads
    is_block: bool = True


class _Spot(NamedTuple):
    """A place or a container that is looked at: what reads it, and in whose words."""

    name: str
    read: Callable[[], Any]
    writer: str
    reader: str
    may_grow: bool = True
    """Whether entries may come to it: its reader makes those that it lacks, as of a cache."""


class CommonState:
    """What runs on a rank and may change what others read.

    Args:
        own: what runs here, and a snapshot of it.
        others: what runs on all stages.
        judged: ids of holders, with names there or with None: forwards are known to hand these on to nobody.
        between: tensors that code between the layers of a model reads.

    Attributes:
        spots: the places that are looked at.
    """

    def __init__(
        self,
        own: Iterable[tuple[Runs, Snapshot]],
        others: Iterable[Runs],
        judged: Judged,
        between: Iterable[Tensor] = (),
    ) -> None:
        self._judged, self._others = judged, list(others)
        self.spots = [spot for one, held in own for spot in self._spots_of(one, held)]
        words = "a tensor of the model's", "a layer", "code between layers"
        self.spots += [_Spot(words[0], partial(self._state_of, tensor), *words[1:]) for tensor in between]
        self._before: list[Any] = []
        self._num_steps, self._why = 0, ""

    def begin(self) -> None:
        """Note what is there before a step."""
        self._num_steps += 1
        self._before = [spot.read() for spot in self.spots]

    def why_changed(self) -> str:
        """Return what has changed since, in this step or behind the last look in one before; empty: nothing has."""
        for spot, was in zip(self.spots, self._before, strict=True) if not self._why else ():
            if not _is_kept(was, spot.read(), may_grow=spot.may_grow):
                self._why = (
                    f"{spot.writer}, or what runs on its stage, sets {spot.name!r} in a forward, backward or hook, and "
                    f"{spot.reader} reads it on another stage, where it is as it was; {HAND_ON}"
                )
                break
        return self._why

    def _spots_of(self, one: Runs, snapshot: Snapshot) -> Iterator[_Spot]:
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

    def _reader_of(self, others: Iterable[Runs], token: int) -> Runs | None:
        """Return who may read what is in a container or a tensor, one that waits for entries rather than others."""
        if (token, None) in self._judged:
            others = (other for other in others if not other.is_block)
        found = [other for other in others if other.reads.reads_into(token)]
        return max(found, key=lambda other: other.reads.awaits_entries(token), default=None)

    def _state_of(self, tensor: Tensor) -> Mapping[Any, Any]:
        """Return how often a tensor was written, and at first its numbers, as `.data` is written without count."""
        return {"": tensor._version, "numbers": numbers_of(tensor) if self._num_steps == 1 else None}

    def _places_in(self, name: str, space: Space, one: Runs, others: Sequence[Runs]) -> Iterator[_Spot]:
        """Yield the places of a holder that code here sets, and code elsewhere reads."""
        keys = one.reads.stored - OF_TORCH if space.form == ".{}" and type(space) is Entries else set(space.keys())
        for key in sorted(keys & one.reads.stored):
            token = id(space.cells[key] if isinstance(space, Cells) else space.holder)
            blocks = (token, key) not in self._judged
            readers = (
                o for o in others if key in o.reads.names and token in o.reads.held and (blocks or not o.is_block)
            )
            if (reader := next(readers, None)) is not None:
                said = space.label(name, key) if isinstance(space, OfClass) else key
                yield _Spot(said, partial(_place_of, space.reader(key)), one.name, reader.name)


def _is_kept(was: Mapping[Any, Any] | Sequence[Any], now: Mapping[Any, Any] | Sequence[Any], *, may_grow: bool) -> bool:
    """Whether all is as it was but, where these may come, for entries that were not there: caches are filled so."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        return (may_grow or len(was) == len(now)) and all(
            value is None or is_same(value, now.get(key, GONE)) for key, value in was.items()
        )
    return len(was) == len(now) and all(map(is_same, was, now))


def _content_of(space: Space) -> Mapping[Any, Any] | Sequence[Any]:
    return dict(space.read()) if not isinstance(space, Items) else tuple(space.holder)


def _place_of(read: Callable[[], Any]) -> Mapping[Any, Any]:
    found = read()
    return {} if found is GONE else {"": found}
