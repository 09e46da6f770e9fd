"""State shared by stages: one module or buffer in blocks of both, a counter in a class, a global of a module.

    model[1] = model[4] = norm     stage 0: norm.running_mean  ┐ each stage would change its own copy, unlike
                                   stage 1: norm.running_mean  ┘ one process: refused, where a forward changes it

Weights are tied, where both blocks have them in submodules; tables that no forward changes may be shared.

Marks that detect values passed on through objects: a block reads a value that a block of another stage has set.

    layer 0    ctx.h0 = h          stage 0's     ┐ a mark in its place tells whether it is read
    layer 3    h + ctx.h0          stage 1's own ┘

Using a mark ends the block's run, whatever the code does with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from types import MappingProxyType
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from quintsched.errors import MisfitError

from ..blocks.block_builders import Parcel
from ..blocks.shape_inference import HAND_ON
from ..user_objects.changes_since_split import sources_of
from ..user_objects.host_value_equality import OPERATORS
from ..user_objects.object_contents import is_of_torch
from ..user_objects.snapshot import Snapshot, label_in
from .names_read_by_code import CodeReads, snapshot_of
from .weights_not_held import require_own_weights
from .writes_across_stages import CodeOnStage, CommonState


class MarkRead(BaseException):
    """Raised when a block uses a mark; a BaseException, so that the block's `except Exception` does not catch it."""


class ReadMark:
    """Placeholder for a value that block `setter`, of another stage, has set."""

    def __init__(self, setter: int) -> None:
        self.setter, self.is_read = setter, False

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in Snapshot({"": (args, tuple((kwargs or {}).values()))}, numbers=False).values():
            if isinstance(value, ReadMark):
                value.is_read = True
        raise MarkRead


def _read(self: ReadMark, *_: Any) -> Any:
    object.__setattr__(self, "is_read", True)
    raise MarkRead


for _operator in OPERATORS:
    setattr(ReadMark, f"__{_operator}__", _read)


BlockHolder = tuple[int, str]
"""Number of a block, and the name of a holder in a snapshot of it."""

ReadMarks = Mapping[int, Sequence[tuple[str, str | int, ReadMark]]]
"""Marks in place of values that other stages set, by block: the owner's name in a snapshot, the key, and the mark."""


class SharedState:
    """Mutable state, other than weights, that blocks of several stages share.

    Args:
        blocks: all blocks; those that are modules as they were given.
        cuts: the blocks of each stage.
        changed: places that forwards are known to change.
        separates: the cause, if any, by which weights of one stage leave the memory that they share with others.
        tied: full names of the weights that each name ties.

    Raises `MisfitError` where forwards change shared state, as far as that is known before they run.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        cuts: Sequence[range],
        changed: Collection[BlockHolder] = (),
        *,
        separates: str = "",
        tied: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self._kinds = [type(block).__name__ for block in blocks]
        self._stage_of = {number: stage for stage, numbers in reversed([*enumerate(cuts)]) for number in numbers}
        self._homes: dict[BlockHolder, list[tuple[BlockHolder, bool]]] = {}
        self._tokens: dict[BlockHolder, set[int]] = {}
        self._places: dict[int, set[BlockHolder]] = {}
        self._blocks = [ref(block) for block in blocks]
        self._runs: list[CodeOnStage] = []
        self._functions: dict[str, Any] = {}
        self._judged, self._rows = set[tuple[int, str | int | None]](), set[int]()
        first: dict[int, BlockHolder] = {}
        owns: dict[BlockHolder, int] = {}
        tensors: list[Sequence[tuple[str, Tensor]]] = []
        for number, block in enumerate(blocks):
            snapshot = Snapshot({"": block}, numbers=False)
            if len(cuts) > 1:
                self._runs.append(self._run_of(number, block, snapshot))
            tensors.append(snapshot.tensors())
            self._rows |= {id(thing) for thing in snapshot.values() if isinstance(thing, list | set | deque)}
            holders = [*snapshot.holders()]
            for name, token in (*holders, *snapshot.cells()):
                self._tokens.setdefault((number, name), set()).add(token)
                self._places.setdefault(token, set()).add((number, name))
            for name, token in holders:
                here = number, name
                owns.setdefault(here, token)  # of a module its attributes, before its buffers
                if name.startswith((".", " (")) and (home := first.setdefault(token, here))[0] != number:
                    is_copy = owns[home] != owns[here]
                    self._homes.setdefault(home, []).append((here, is_copy))
                    self._homes.setdefault(here, []).append((home, is_copy))
        require_own_weights(blocks, self._stage_of, tensors, separates, tied)
        for number, name in sorted({*changed, *_norms(blocks)}):
            self._require_one_stage(number, name, is_attribute=False)

    def require_one_stage(self, parcels: Sequence[Parcel]) -> None:
        """Raise `MisfitError` where a block changes state that a block of another stage shares."""
        named: dict[str, int] = {}
        for number, parcel in enumerate(parcels):
            for state in parcel.state:
                if state.is_named:
                    other = named.setdefault(state.name, number)
                    self._refuse_apart(other, number, f"change {state.name!r}, which is of neither")
                else:
                    self._require_one_stage(number, state.name, is_attribute=state.is_attribute)

    def let_read(self, functions: Mapping[str, Any]) -> None:
        """Add the functions that the last stage calls, by name: they may read state that blocks set."""
        self._functions = dict(functions) if self._runs else {}

    def common(self, own: Mapping[int, nn.Module]) -> CommonState | None:
        """Return the state that the given blocks may change and other stages read, recorded now; None: there is none.

        Raises `MisfitError` on all ranks where stages pass values on through files.
        """
        given = [(number, block) for number, reference in enumerate(self._blocks) if (block := reference()) is not None]
        if not self._runs or all(map(is_of_torch, [*dict(given).values(), *own.values(), *self._functions.values()])):
            return None
        for number, block in given:
            self._runs[number] = self._run_of(number, block, snapshot_of(block))
        last = max(self._stage_of.values())
        functions = [
            (CodeOnStage(name, last, CodeReads(function, held := snapshot_of(function), is_block=False), False), held)
            for name, function in self._functions.items()
        ]
        here = [(self._run_of(number, block, held := snapshot_of(block)), held) for number, block in own.items()]
        if any(run.stage == last for run, _ in here):
            here += functions
        others = [*self._runs, *(run for run, _ in functions)]
        _require_files_apart(others)
        between = [tensor for source in sources_of(own.values()) for tensor in source.tensors_read()]
        found = CommonState(here, others, self._judged, between)
        return found if found.spots else None

    def _run_of(self, number: int, block: nn.Module, snapshot: Snapshot) -> CodeOnStage:
        name = f"block {number} ({type(block).__name__})"
        return CodeOnStage(name, self._stage_of[number], CodeReads(block, snapshot))

    def require_none_handed_on(self, parcels: Sequence[Parcel], run: Callable[[ReadMarks], object]) -> None:
        """Raise `MisfitError` where a block reads host state that a block of another stage sets.

        `run` runs all blocks again, with marks in place of values that other stages have set.
        """
        setters = [
            (number, state) for number, parcel in enumerate(parcels) for state in parcel.state if state.key != ""
        ]
        own = {(token, s.key, number) for number, s in setters for token in self._tokens.get((number, s.owner), ())}
        marks: dict[int, list[tuple[str, str | int, ReadMark]]] = {}
        judged = set[tuple[int, str | int | None]]()
        for number, state in setters:
            tensor = f"{state.owner}.{state.key}"
            grown = self._rows if state.said == state.owner else ()  # other code may read its length
            tokens = self._tokens_at(number, state.owner, tensor)
            judged |= {(token, None) for token in tokens.difference(grown)}
            cell = f", {state.key}"  # a closure variable of functions in both blocks
            for token in self._tokens_at(number, state.owner, state.owner + cell):
                judged.add((token, state.key))
                for other, place in self._places[token]:
                    owner = place.removesuffix(cell)
                    is_cache = state.is_new and (token, state.key, other) in own  # each makes it where it is missing
                    if self._stage_of[other] != self._stage_of[number] and not is_cache:
                        marks.setdefault(other, []).append((owner, state.key, ReadMark(number)))
        with suppress(MisfitError, MarkRead):  # blocks that need data are judged by what they do in steps
            if marks:
                run(marks)
            self._judged |= judged
        for other, places in marks.items():
            for _, key, mark in places:
                if mark.is_read:
                    stages = [self._stage_of[number] for number in sorted((mark.setter, other))]
                    raise MisfitError(
                        f"{self._said(mark.setter, other)} hand {key!r} on through an object, and are on stages "
                        f"{stages[0]} and {stages[1]}, of which each has its own; {HAND_ON}"
                    )

    def _tokens_at(self, number: int, *names: str) -> set[int]:
        return {token for name in names for token in self._tokens.get((number, name), ())}

    def _require_one_stage(self, number: int, name: str, *, is_attribute: bool) -> None:
        for (other, _), is_copy in self._homes.get((number, name), ()):
            what = f"have one {name.lstrip(' .')}, which a forward changes"
            if is_attribute and is_copy:  # a module with weights of its own per block needs attributes of its own too
                raise MisfitError(f"{self._said(other, number)} {what}; {_INSTEAD}")
            self._refuse_apart(other, number, what)

    def _refuse_apart(self, one: int, other: int, what: str) -> None:
        one, other = sorted((one, other))
        stages = self._stage_of[one], self._stage_of[other]
        if stages[0] != stages[1]:
            raise MisfitError(
                f"{self._said(one, other)} {what}, and are on stages {stages[0]} and {stages[1]}, of which each would "
                f"change its own; {_INSTEAD}, or keep them on one stage"
            )

    def _said(self, *numbers: int) -> str:
        return "blocks " + " and ".join(f"{number} ({self._kinds[number]})" for number in sorted(numbers))


def _require_files_apart(runs: Sequence[CodeOnStage]) -> None:
    """Raise `MisfitError` where code of one stage writes files or the environment, and that of another reads some."""
    for one, other in product(runs, repeat=2):
        written, read = one.reads.uses.writes, other.reads.uses.reads
        found = [pair for pair in product(sorted(written), sorted(read)) if len({*map(_is_of_environment, pair)}) == 1]
        if found and one.stage != other.stage:
            raise MisfitError(
                f"{one.name} writes files or the environment ({found[0][0]}), and {other.name} reads some "
                f"({found[0][1]}) on another stage, at any time before or after; {HAND_ON}"
            )


def _is_of_environment(call: str) -> bool:
    return call.startswith(("os.env", "os.getenv", "os.putenv"))


_INSTEAD = "give each block its own: copy.deepcopy(module)"


def _norms(blocks: Sequence[nn.Module]) -> Iterator[BlockHolder]:
    """Yield the norms in training mode that keep running statistics."""
    for number, block in enumerate(blocks):
        for path, module in block.named_modules():
            if isinstance(module, _NormBase) and module.training and module.running_mean is not None:
                yield number, label_in(block, path)
