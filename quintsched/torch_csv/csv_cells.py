"""Strict parser of a file's cells: every fault is one `InputError` that names its line and cell.

torch's parser is more lenient: its pattern is not anchored, so that `0F0x` is read as `0F0` and `2BW0` as `2B`; and
it stores actions in sets, so that a duplicate is counted once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple, NoReturn, TypeAlias

from quintsched.errors import InputError, counted
from quintsched.files.strictjson import shorten
from quintsched.torch_csv.csv_vocabulary import (
    COMPUTATIONS,
    ENDS_BACKWARD,
    MESSAGE_WORDS,
    NEEDS,
    OVERLAP,
    SHARDING,
    Word,
)

MAX_CHARACTERS = 2**28

_NUMBERED = {
    word.value: word for word in (*COMPUTATIONS, *MESSAGE_WORDS, Word.WAIT_SEND_FORWARD, Word.WAIT_SEND_BACKWARD)
}
_NUMBER = "(0|[1-9][0-9]{0,7})"
_BY_NAME = {word.value: word for word in Word}
_WORDS = "|".join(_BY_NAME)
_ACTION = re.compile(f"{_NUMBER}({_WORDS}){_NUMBER}?")
_AS_TORCH_READS = re.compile(rf"\d+({_WORDS})\d*")
_OVERLAP = re.compile(rf"\(([^();]*);([^();]*)\){OVERLAP}")


class CsvCell(NamedTuple):
    """One action with its position: `rank` and `step` count lines and cells from 0."""

    stage: int
    word: Word
    microbatch: int | None
    rank: int
    step: int

    def __str__(self) -> str:
        return f"{self.stage}{self.word.value}{'' if self.microbatch is None else self.microbatch}"

    @property
    def place(self) -> str:
        """Position as text, both in the counting of editors and of torch."""
        return _place(self.rank, self.step)


CsvCells: TypeAlias = tuple[CsvCell, ...]
"""Actions of a file, line after line; the two of an overlap have the same position."""


def by_place(cells: Iterable[CsvCell]) -> Iterator[CsvCells]:
    """Yield the actions of each cell of the file: one, or the two of an overlap."""
    for _, found in groupby(cells, key=lambda cell: (cell.rank, cell.step)):
        yield tuple(found)


def run_side_by_side(found: CsvCells) -> bool:
    """Return whether a cell's actions form an `Overlap`: a forward, and a full backward that does not depend on it."""
    forwards, backwards = ([cell for cell in found if cell.word is word] for word in (Word.FORWARD, Word.BACKWARD))
    return bool(forwards and backwards) and forwards[0]._replace(word=Word.BACKWARD) != backwards[0]


def written(cells: Iterable[object]) -> str:
    """Return the text of a cell with these actions."""
    words = [*map(str, cells)]
    return words[0] if len(words) == 1 else f"({';'.join(words)}){OVERLAP}"


def _place(rank: int, step: int) -> str:
    return f"line {rank + 1}, cell {step + 1} (rank {rank}, step {step})"


def _refuse(cell: CsvCell, words: str) -> NoReturn:
    raise InputError(f"{cell.place}: {cell} {words}")


def read_cells(text: str) -> CsvCells:
    """Return the actions of a file; raises `InputError` with the place of the first fault."""
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"the file has {len(text)} characters; a schedule has at most {MAX_CHARACTERS}")
    lines = text.removesuffix("\n").split("\n")
    cells = tuple(cell for rank, line in enumerate(lines) for cell in _line(line.removesuffix("\r"), rank))
    _refuse_repetitions(cells)
    _refuse_wrong_homes(cells)
    _refuse_gaps(cells)
    _refuse_older_alphabet(cells)
    _refuse_disorder(cells)
    _refuse_reductions_out_of_place(cells)
    return cells


def _line(line: str, rank: int) -> Iterator[CsvCell]:
    cells: list[CsvCell] = []
    for step, text in enumerate(line.split(",")):
        match = _ACTION.fullmatch(text)
        if match and match[3] and (word := _NUMBERED.get(match[2])):  # fast path: nearly all cells
            cells.append(CsvCell(int(match[1]), word, int(match[3]), rank, step))
        elif text:
            cells += _actions(text.strip(" \t"), rank, step)
    if not any(cell.word in COMPUTATIONS for cell in cells):
        raise InputError(f"line {rank + 1} (rank {rank}) computes nothing; each line is a pipeline rank with a stage")
    yield from cells


def _actions(text: str, rank: int, step: int) -> Iterator[CsvCell]:
    """Yield the actions of one cell: none, one, or the two of an overlap."""
    overlap = _OVERLAP.fullmatch(text) if text.startswith("(") else None
    if not overlap:
        if text:
            yield _action(text, rank, step)
        return
    parts = [_action(part.strip(" \t"), rank, step) for part in overlap.groups()]
    words = {part.word for part in parts}
    if Word.FORWARD not in words or not words & {Word.BACKWARD, Word.INPUT_HALF}:
        raise InputError(f"{_place(rank, step)}: {shorten(text)!r} overlaps other things than a forward and a backward")
    yield from parts


def _action(text: str, rank: int, step: int) -> CsvCell:
    match = _ACTION.fullmatch(text)
    if not match:
        read = _AS_TORCH_READS.match(text)
        torchs = f"; torch reads it as {shorten(read.group())!r}" if read and read.group() != text else ""
        raise InputError(
            f"{_place(rank, step)}: {shorten(text)!r} is no action{torchs}; write a stage, one of "
            f"{_WORDS.replace('|', ' ')}, and a microbatch, like 0F0"
        )
    stage, word, microbatch = int(match[1]), _BY_NAME[match[2]], match[3]
    takes_microbatch = word.value in _NUMBERED
    if takes_microbatch != (microbatch is not None):
        wrong = "lacks its microbatch" if takes_microbatch else "is about a whole stage and takes no microbatch"
        raise InputError(f"{_place(rank, step)}: {text} {wrong}")
    return CsvCell(stage, word, int(microbatch) if takes_microbatch else None, rank, step)


def _refuse_repetitions(cells: CsvCells) -> None:
    seen: dict[tuple[object, ...], CsvCell] = {}
    for cell in cells:
        first = seen.setdefault((cell.stage, cell.word, cell.microbatch), cell)
        if first is not cell and cell.word not in SHARDING:
            _refuse(cell, f"is already in {first.place}; it is done once")


def _refuse_wrong_homes(cells: CsvCells) -> None:
    """Refuse an action of a stage on another rank than the one that computes the stage."""
    homes: dict[int, CsvCell] = {}
    for cell in cells:
        if cell.word in COMPUTATIONS:
            homes.setdefault(cell.stage, cell)
    for cell in cells:
        home = homes.get(cell.stage)
        if home is None:
            _refuse(cell, f"is of stage {cell.stage}, which no rank computes")
        if home.rank != cell.rank:
            _refuse(cell, f"is of stage {cell.stage}, which rank {home.rank} computes: see {home} in {home.place}")


def _refuse_gaps(cells: CsvCells) -> None:
    """Refuse gaps: stages and microbatches are numbered from 0, and each stage computes each microbatch."""
    forwards = [cell for cell in cells if cell.word is Word.FORWARD]
    stages = {cell.stage: cell for cell in cells}
    microbatches = {cell.microbatch or 0: cell for cell in forwards}
    for what, found in (("stage", stages), ("microbatch", microbatches)):
        missing = next((number for number, known in enumerate(sorted(found)) if number != known), None)
        if missing is not None:
            _refuse(found[max(found)], f"is there, but nothing of {what} {missing}; they are numbered from 0 upwards")
    if len(stages) * len(microbatches) > len(cells):
        raise InputError(
            f"the file holds {counted(len(cells), 'action')}, too few for {counted(len(microbatches), 'microbatch')} "
            f"on {counted(len(stages), 'stage')}"
        )


def _refuse_older_alphabet(cells: CsvCells) -> None:
    """Refuse a weight half beside a full backward: in the older alphabet, B was the input half."""
    whole = {(cell.stage, cell.microbatch): cell for cell in cells if cell.word is Word.BACKWARD}
    halved = {(cell.stage, cell.microbatch) for cell in cells if cell.word is Word.INPUT_HALF}
    for cell in cells:
        key = cell.stage, cell.microbatch
        if cell.word is Word.WEIGHT_HALF and key in whole and key not in halved:
            _refuse(
                cell,
                f"is half of a backward, but {whole[key]} in {whole[key].place} is a whole one; is the file of the "
                "older alphabet, which wrote B for the input half? It is I today",
            )


def _refuse_disorder(cells: CsvCells) -> None:
    """Refuse a backward before its forward, and a weight half before its input half."""
    done: set[tuple[object, ...]] = set()
    for cell in cells:
        needed = NEEDS.get(cell.word)
        if needed and (cell.stage, needed, cell.microbatch) not in done:
            _refuse(cell, f"comes without {cell._replace(word=needed)} before it")
        done.add((cell.stage, cell.word, cell.microbatch))


def _refuse_reductions_out_of_place(cells: CsvCells) -> None:
    """Refuse gradient reductions that do not follow each stage's last backward, if the file has any."""
    reductions = {cell.stage: cell for cell in cells if cell.word is Word.REDUCE_GRAD}
    if not reductions:
        return
    last = {cell.stage: (index, cell) for index, cell in enumerate(cells) if cell.word in ENDS_BACKWARD}
    for index, cell in enumerate(cells):
        behind, backward = last.get(cell.stage, (-1, cell))
        if cell.word is Word.REDUCE_GRAD and behind > index:
            _refuse(cell, f"comes before {backward} in {backward.place}, whose gradient it misses")
    for stage, (_, backward) in sorted(last.items()):
        if stage not in reductions:
            _refuse(backward, f"is the last backward of stage {stage}, but no {stage}{Word.REDUCE_GRAD.value} follows")
