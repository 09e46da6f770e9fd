"""State that forwards change: it goes by microbatches, and each replica has its own; said once where there are several.

    self.calls += 1     self.average.lerp_(x.mean(0), 0.1)     u, v of a spectral norm     Layer.calls += 1

One process has it after all forwards of a step, each of several replicas after its own. Tables that are made where
there were none are no such state, and neither are the statistics of norms and the loads of experts, which replicas put
together.

Code of blocks may begin to change it later, by a flag that the loop sets, or where the meta device cannot run:

    self.amax = max(self.amax, float(x.abs().max()))     self.stats.calls += 1     seen[0] += 1, around the function

All that a `Snapshot` of the blocks finds is looked at before and behind each step and evaluation: attributes of
objects, modules and classes, variables around functions, globals, entries of containers, generators; tensors, by which
they are and the versions that torch counts. In step 0, 1, 2, 4, 8, … also the numbers of frozen weights, as of a
teacher that begins as a copy, large arrays, and what there are too many places of. A dict may grow: it is a table.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from ..blocks.blocks import Parcel, State
from ..objects.host_values import numbers_of
from ..objects.snapshot import Snapshot
from ..objects.spaces import CONTAINERS, LONGEST, OF_TORCH, Entries, Space, Trained, is_of_torch
from ..objects.user_code import PLAIN, is_of_library, is_ours
from ..parallel.dropout import KeyedDropout

_logger = logging.getLogger("quintsched.runtime")

_MOST_NAMED = 3

_MOST_EACH, _MOST_BYTES, _MOST_NESTED, _MOST_WALKS = 2000, 1 << 16, 3, 16
"""More holders, or larger arrays, are looked at in few steps; values so deep; blocks are walked again so often."""

_NO_STATE = (FunctionType, ModuleType)
_NO_KEYS = OF_TORCH | KeyedDropout.__annotations__.keys()
"""Attributes that are torch's and ours."""

_Numbers = tuple[float, float]
"""What tells the numbers of a weight."""


def state_named(blocks: Sequence[nn.Module], parcels: Sequence[Parcel]) -> list[str]:
    """Return what blocks were found to change, by its names."""
    return [*dict.fromkeys(name for name, _, _ in _own_state(blocks, parcels))]


def state_of_replicas(blocks: Sequence[nn.Module], parcels: Sequence[Parcel], *, buffers: bool) -> list[str]:
    """Return what of it replicas do not put together, by its names; `buffers`: these as well."""
    found = _own_state(blocks, parcels)
    return [
        *dict.fromkeys(
            name
            for name, module, state in found
            if not (state.is_new or isinstance(module, _NormBase)) and (state.is_attribute or buffers)
        )
    ]


def counters_made(blocks: Sequence[nn.Module], parcels: Sequence[Parcel]) -> list[str]:
    """Return the names of counters that forwards have made: each replica has one, and they count alike."""
    return [name for name, _, state in _own_state(blocks, parcels) if state.is_new and state.counts]


def _own_state(blocks: Sequence[nn.Module], parcels: Sequence[Parcel]) -> Iterator[tuple[str, nn.Module | None, State]]:
    """Yield what users' modules in blocks, classes and globals have, and forwards change: its name, the module, if it
    is one's, and what it is.
    """
    for number, (block, parcel) in enumerate(zip(blocks, parcels, strict=True)):
        for state in parcel.state:
            if state.is_named:
                yield state.name, None, state
            if state.owner.startswith((".", " (")):
                module = block.get_submodule(state.owner.partition(" (")[0].removeprefix("."))
                if not is_ours(type(module)):
                    yield _said(number, block, state.said), module, state


def _said(number: int | str, block: nn.Module, name: str) -> str:
    """Return what a place is called in messages, by its name in a snapshot of a block."""
    if not name.startswith((".", " (")):
        return name
    path, _, rest = name.partition(" (")
    return f"block {number} ({type(block).__name__}){path}{rest.partition(')')[2]}"


def replicas_line(found: Sequence[str], replicas: int) -> str | None:
    """Return a line on what forwards change, by names; None where that is nothing, or there is one replica."""
    if not found or replicas == 1:
        return None
    return (
        f"{_listed(found)}: changed by forwards, of which each of {replicas} replicas runs its own: it is not what one "
        "process has after all of them, nor what depends on it"
    )


def changed_line(found: Sequence[str], microbatches: int) -> str | None:
    """Return a line on what forwards change, by names; None where that is nothing, or a step has one microbatch."""
    if not found or microbatches < 2:
        return None
    return (
        f"{_listed(found)}: changed by forwards, of which a step has {microbatches}: it "
        "counts microbatches, not steps, and sees one at a time: let the training loop change what goes by steps"
    )


def _listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return f"{', '.join(found[:_MOST_NAMED])}{more}"


class LateState:
    """What code of some blocks changes, by what it is called in messages.

    Args:
        blocks: by their numbers.
        are_whole: whether frozen weights are resident between steps, as they are without ZeRO-3.
        may_hook: whether blocks may have a hook of ours for a while.

    Attributes:
        known, known_apart: what is named already as going by microbatches, and by replicas.
        is_empty: whether nothing but frozen weights may change: no code is a user's.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], *, are_whole: bool, may_hook: bool = False) -> None:
        self.known, self.known_apart = list[str](), list[str]()
        self._are_whole, self._frozen_in = are_whole, blocks if are_whole else {}
        self._blocks = {number: block for number, block in blocks.items() if not is_of_torch(block)}
        self.is_empty = not self._blocks
        self._frozen, self._is_first = dict[str, _Numbers](), True
        self._holders: list[_Holder] = []
        self._before: list[_Marks] = []
        self._met = set[int]()
        self._walks, self._is_due = 0, False
        self._weights: list[tuple[str, nn.Parameter]] = []
        self._versions: list[int] = []
        self._written: list[str] | None = []
        self._last = [*self._blocks.values()][-1:] if may_hook else []
        self._handles: list[RemovableHandle] = []
        self._between: list[_Marks] = []

    def begin(self, *, is_due: bool) -> None:
        """Note what all is before a step, or an evaluation; where it is due, also what takes long."""
        self._is_due = is_due
        self._frozen = dict(self._frozen_now()) if is_due else {}
        if self.is_empty:
            return
        self._before, met = self._now()
        if (is_due or self._walks < _MOST_WALKS) and not (self._walks and met <= self._met):  # by what was put there
            self._walks += 1
            self._holders = [*_holders_in(self._blocks)]
            self._weights = [
                (_said(number, block, f" ().{name}"), weight)
                for number, block in (self._blocks if self._are_whole else {}).items()
                for name, weight in block.named_parameters()
            ]
            self._before, self._met = self._now()
        self._versions, self._written = [weight._version for _, weight in self._weights], None
        self._look_between()
        if is_due:
            self._handles = [block.register_forward_hook(self._look_between) for block in self._last]

    def _look_between(self, *_: object) -> None:
        """Note what all is behind the first forward: others may let it be what it was."""
        self._between = self._now()[0] if self._handles else []
        while self._handles:
            self._handles.pop().remove()

    def look(self) -> None:
        """Find the weights that have been written to since the beginning, before an optimizer does so."""
        now = [weight._version for _, weight in self._weights]
        self._written = [
            name for (name, _), was, its in zip(self._weights, self._versions, now, strict=True) if was != its
        ]

    def tell(
        self,
        microbatches: int,
        replicas: int,
        share: Callable[[bytes], Sequence[bytes]] | None = None,
        *,
        speaks: bool = True,
    ) -> None:
        """Write a line on what a step has changed and nobody has named.

        `share` tells the replicas what each has made that was not there, and returns what all have: unlike numbers are
        state of replicas, others a table. Without `speaks` it does no more than that.
        """
        frozen = dict(self._frozen_now()) if self._frozen else {}
        moved = [name for name, numbers in frozen.items() if self._frozen.get(name, numbers) != numbers]
        if self._written is None:
            self.look()
        moved += [] if self._is_first or self._written is None else self._written
        if self._is_first:  # which `weights_unchanged` names
            self.known, self.known_apart = self.known + moved, self.known_apart + moved
        made = dict[str, str]()
        for now in filter(None, (self._between, self._now()[0])):
            for holder, was, found in zip(self._holders, self._before, now, strict=True):
                names, new = holder.moved(was, found) if was != found else ([], {})
                made |= new if self._is_first else {}
                moved += [*names, *(new if (holder.is_module if self._is_first else not holder.is_container) else ())]
        self._is_first, self._before = False, []
        apart = [name for name in moved if name not in made] + (_unlike(made, share) if share is not None else [])
        of_steps = [*dict.fromkeys(name for name in moved if name not in self.known)]
        of_replicas = [*dict.fromkeys(name for name in apart if name not in self.known_apart)]
        self.known, self.known_apart = self.known + of_steps, self.known_apart + of_replicas
        lines = changed_line(of_steps, microbatches), replicas_line(of_replicas, replicas)
        for line in filter(None, lines if speaks else ()):
            _logger.warning("%s", line)

    def _now(self) -> tuple[list[_Marks], set[int]]:
        """Return what is in each holder, and the ids of what else may hold something."""
        if not self._is_due and len(self._holders) > _MOST_EACH:
            return [{} for _ in self._holders], self._met
        found = [holder.marks(is_due=self._is_due) for holder in self._holders]
        return found, {id(mark.thing) for marks in found for mark in marks.values() if type(mark) is _Thing}

    def _frozen_now(self) -> Iterator[tuple[str, _Numbers]]:
        for number, block in self._frozen_in.items():
            for name, weight in block.named_parameters():
                if not weight.requires_grad and type(weight) is nn.Parameter and not weight.is_complex():
                    numbers = weight.detach().double().nan_to_num()
                    yield (
                        f"block {number} ({type(block).__name__}).{name}",
                        (float(numbers.sum()), float(numbers.square().sum())),
                    )


class _Version:
    """Which tensor something is, and how often it was written to. Another may have come where one is gone."""

    def __init__(self, tensor: Tensor, *, is_due: bool) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self._of, self.place = ref(tensor), id(tensor)
            self._version = 0 if tensor.is_inference() else tensor._version
            self._numbers = numbers_of(tensor) if is_due and tensor.nbytes <= _MOST_BYTES else None

    def __eq__(self, now: object) -> bool:
        return (
            isinstance(now, _Version)
            and (self.place, self._version, self._numbers) == (now.place, now._version, now._numbers)
            and self._of() is not None
        )


class _Thing:
    """An object, or a container: it is the same, or has the same entries."""

    def __init__(self, thing: Any, depth: int) -> None:
        self.thing, self._depth = thing, depth

    def __eq__(self, now: object) -> bool:
        if not isinstance(now, _Thing) or type(self.thing) is not type(now.thing):
            return False
        one, other = self.thing, now.thing
        if one is other:
            return True
        if type(one) in CONTAINERS and self._depth < _MOST_NESTED:
            return _entries_of(one, self._depth + 1) == _entries_of(other, self._depth + 1)
        if isinstance(one, np.ndarray):
            return one.shape == other.shape and bool(np.array_equal(one, other))
        with suppress(Exception):
            return is_of_library(type(one)) and not isinstance(one, Tensor | nn.Module) and bool(one == other)
        return False


_Marks = Mapping[Any, Any]
"""What tells of the value under each key whether it has changed."""


class _Holder(NamedTuple):
    """Something that has places.

    Attributes:
        space: where they are; said: returns what a place is called, by its name in the space.
        name: of the holder in a snapshot.
        is_module: whether they are attributes of a module.
    """

    space: Space
    said: Callable[[str], str]
    name: str
    is_module: bool

    def marks(self, *, is_due: bool) -> _Marks:
        """Return what tells whether it has changed; nothing for a large array unless it is due."""
        holder = self.space.holder
        if self.is_container:
            return _entries_of(holder)
        if isinstance(holder, np.ndarray) and holder.nbytes > _MOST_BYTES and not is_due:
            return {}
        return {key: _mark_of(value, is_due=is_due) for key, value in self.space.read().items() if key not in _NO_KEYS}

    @property
    def is_container(self) -> bool:
        """Whether the places are entries."""
        return self.space.form == "[{}]"

    def moved(self, was: _Marks, now: _Marks) -> tuple[list[str], dict[str, str]]:
        """Return the names of what is another now, and of what is where nothing was, with its numbers in words."""
        changed = [key for key in {**was, **now} if was.get(key) != now.get(key)]
        if not isinstance(self.space.holder, dict) and (None in changed or (self.is_container and len(changed) > 1)):
            return [self.said(self.name)], {}
        said = {key: self.said(self.space.label(self.name, key)) for key in changed}
        new = [key for key in changed if was.get(key) is None]
        values = self.space.read() if new else {}
        return [said[k] for k in changed if k not in new], {said[k]: _words_of(values.get(k)) for k in new}


def _unlike(made: Mapping[str, str], share: Callable[[bytes], Sequence[bytes]]) -> list[str]:
    """Return the names of what not all have made alike."""
    told = [json.loads(text) for text in share(json.dumps(made).encode())]
    return [name for name, words in made.items() if any(its.get(name) != words for its in told)]


def _words_of(value: Any) -> str:
    """Return what tells a number, or a small tensor's; empty for anything else."""
    if type(value) is Tensor:
        return numbers_of(value) or ""
    return repr(value) if isinstance(value, PLAIN) else ""


def _mark_of(value: Any, depth: int = 0, *, is_due: bool = False) -> Any:
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return _Version(value, is_due=is_due)
    if isinstance(value, tuple) and depth < _MOST_NESTED:
        return tuple(_mark_of(part, depth + 1, is_due=is_due) for part in value[:LONGEST])
    return _Thing(value, depth)


def _entries_of(container: Any, depth: int = 0) -> _Marks:
    """Return marks of the entries of a container, and, but of a dict, of how many there are, under None."""
    if isinstance(container, set):
        return {None: (len(container), frozenset(entry for entry in container if isinstance(entry, PLAIN)))}
    if len(container) > LONGEST:
        is_dict = isinstance(container, dict)
        return {} if is_dict else {None: (len(container), *(_mark_of(container[k], depth) for k in (0, -1)))}
    if isinstance(container, dict):
        return {key: _mark_of(entry, depth) for key, entry in container.items()}
    return {None: len(container), **{k: _mark_of(entry, depth) for k, entry in enumerate(container)}}


def _holders_in(blocks: Mapping[str, nn.Module]) -> Iterator[_Holder]:
    """Yield what users' code in blocks may change, each once: no weights and norms, and nothing of this package's."""
    seen, of_modules = set[int](), dict[int, tuple[dict[str, Any], set[str]]]()
    for number, block in blocks.items():
        snapshot = Snapshot({"": block}, numbers=False)
        modules = [thing for thing in snapshot.values() if isinstance(thing, nn.Module)]
        seen |= {id(held) for module in modules for held in _not_looked_at(module)}
        attributes, found, held = {id(vars(module)) for module in modules}, list[_Holder](), set[int]()
        for name, space in snapshot.spaces():
            token = id(space.holder)
            if isinstance(space, Entries) and space.names is not None:
                of_modules.setdefault(token, (space.holder, set()))[1].update(space.names)
                held.update(tensor for value in space.read().values() for tensor in _tensors_of(_mark_of(value)))
            elif token not in seen and not isinstance(space, Trained):
                seen.add(token)
                found.append(_Holder(space, partial(_said, number, block), name, token in attributes))
        yield from found
        held.update(
            tensor for one in found for mark in one.marks(is_due=False).values() for tensor in _tensors_of(mark)
        )
        seen |= held | {id(weight) for weight in block.parameters()}
        loose = {name: tensor for name, tensor in snapshot.tensors() if id(tensor) not in seen}
        yield _Holder(Entries(loose, "{}"), partial(_said, number, block), "", is_module=False)
    for holder, names in of_modules.values():
        own = frozenset(name for name in names if not isinstance(holder.get(name), (*_NO_STATE, type)))
        yield _Holder(Entries(holder, "{}", own), str, "", is_module=False)


def _tensors_of(mark: Any) -> Iterator[int]:
    """Yield the ids of tensors that a mark is of."""
    if isinstance(mark, tuple):
        for part in mark:
            yield from _tensors_of(part)
    elif isinstance(mark, _Version):
        yield mark.place


def _not_looked_at(module: nn.Module) -> Iterator[Any]:
    own = vars(module)
    yield from (own[key] for key in OF_TORCH & own.keys() if key != "_buffers")
    is_made_here = is_ours(type(module)) and not isinstance(module, KeyedDropout)  # which stands for a user's layer
    if is_made_here:
        yield own
    if is_made_here or isinstance(module, _NormBase):
        yield own["_buffers"]
        yield from own["_buffers"].values()
