"""What a rank says of itself while it runs: a store per instruction, a few per phase.

publisher.enter("step", step=12, program=0)    phases: from here on, until the next
with publisher.phase("save"): …                the same for a while; then what it was before
numbers[INDEX] = 17                            the interpreter, before each call
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar
from weakref import ref

from quintsched.stalls.states import Phase

from .cell import (
    ENTERED,
    GIVEN,
    INDEX,
    NOTHING,
    NOWHERE,
    PHASE,
    PHASES,
    PROGRAM,
    ROOM,
    RUN,
    SENT,
    SENT_AT,
    STEP,
    WAIT,
    WORLD_CODE,
    Cell,
    WaitCell,
)

if TYPE_CHECKING:
    from quintsched.plan import Plan

    from .watcher import Answer, Watcher

Thing = TypeVar("Thing")
_END = object()
_UNKNOWN = 0, None
NUMBER_OF: dict[Phase, int] = {phase: number for number, phase in enumerate(PHASES)}


class Publisher:
    """One rank's side of the watch; without a watcher nobody hears of it.

    Attributes:
        numbers: the cell's, for stores in hot loops.
    """

    def __init__(self, cell: Cell | None = None, watcher: Watcher | None = None) -> None:
        self._cell = cell or Cell(0, shared=False)
        self.numbers = self._cell.numbers
        self._watcher = watcher
        self._programs: dict[int, tuple[int, ref[Plan]]] = {}
        self._num_programs = 0

    def follow(self, waits: WaitCell) -> None:
        """Let what is written down of waits be in this cell from now on."""
        waits.move(self.numbers, WAIT)

    def enter(self, phase: Phase, *, step: int | None = None) -> None:
        """Say that a phase begins; `step`: the number of the training step that begins with it, the first is 1."""
        numbers = self.numbers
        numbers[INDEX] = NOWHERE
        numbers[WAIT] = NOTHING
        numbers[PHASE] = NUMBER_OF[phase]
        numbers[ENTERED] += 1
        if step is not None:
            numbers[STEP] = step

    def walk(self, plan: Plan) -> None:
        """Say that the program of a plan begins."""
        number, known = self._programs.get(id(plan), _UNKNOWN)
        self.numbers[PROGRAM] = number if known is not None and known() is plan else self.number_of(plan)
        self.numbers[RUN] += 1

    @contextmanager
    def phase(self, phase: Phase, step: int | None = None) -> Iterator[None]:
        """Say that a phase begins, and, behind the block, that the one before goes on; an error leaves it as it is."""
        before = PHASES[self.numbers[PHASE]]
        self.enter(phase, step=step)
        yield
        self.enter(before)

    def fetching(self, batches: Iterable[Thing]) -> Iterator[Thing]:
        """Yield batches; while each is fetched, this rank is about data."""
        left = iter(batches)
        while True:
            with self.phase("data"):
                batch = next(left, _END)
            if batch is _END:
                return
            yield batch  # type: ignore[misc]

    def number_of(self, plan: Plan) -> int:
        """Return the number that a plan goes by: how many others this rank ran before it."""
        number, known = self._programs.get(id(plan), _UNKNOWN)
        if known is None or known() is not plan:
            number, self._num_programs = self._num_programs, self._num_programs + 1
            self._programs = {key: value for key, value in self._programs.items() if value[1]() is not None}
            self._programs[id(plan)] = number, ref(plan)
            if self._watcher is not None:
                self._watcher.tell_program(number, plan)
        return number

    def tell_first(self, plan: Plan | None) -> None:
        """Say what the run's own plan is, if that is known, so that it goes by the first number."""
        if plan is not None:
            self.number_of(plan)

    @contextmanager
    def waiting_for_all(self) -> Iterator[None]:
        """Say, while the block runs, that this rank waits for all others: before there are groups to be named."""
        self.numbers[WAIT] = WORLD_CODE
        yield
        self.numbers[WAIT] = NOTHING

    def tell_group(self, ranks: tuple[int, ...]) -> None:
        """Say that this rank is in a further group: the k-th, counted from 0, is number k where it is waited for."""
        if self._watcher is not None:
            self._watcher.tell_group(ranks)

    def note_longer(self, nbytes: int, index: int) -> None:
        """Say that an instruction sends a message that is longer than those that it sent before."""
        self.numbers[SENT], self.numbers[SENT_AT] = nbytes, index

    def note_room(self, nbytes: int) -> None:
        """Say that a message of so many bytes could come in."""
        self.numbers[ROOM] = max(self.numbers[ROOM], nbytes)

    def begin_batch(self, samples: int, length: int, targets: int) -> None:
        """Say that this rank is given one more batch: samples, how long they are, rows of targets; 0: nobody knows."""
        numbers = self.numbers
        numbers[GIVEN] += 1
        numbers[GIVEN + 1], numbers[GIVEN + 2], numbers[GIVEN + 3] = samples, length, targets

    def note_given(self, samples: int, length: int, targets: int) -> None:
        """Say more of what this rank is given; 0: as it was."""
        for beside, number in enumerate((samples, length, targets), 1):
            if number:
                self.numbers[GIVEN + beside] = number

    def fail(self, error: BaseException) -> None:
        """Say why this rank ends."""
        if self._watcher is not None:
            self._watcher.tell_error(error)

    def has_said(self, error: BaseException) -> bool | None:
        """Return whether who hears this rank has told the user of its error, so that it need not.

        False: no, as all ranks have this error; None: there is no telling. Takes a few seconds at most.
        """
        return None if self._watcher is None else self._watcher.has_said(error)

    def explain(self, said: str, *, in_code: bool = False) -> Answer | None:
        """Say that a wait for other ranks failed, and return whose fault it was; None: nobody says.

        `in_code`: it was the user's code that waited; the message is empty where that failed by itself. Takes a few
        seconds at most.
        """
        return None if self._watcher is None else self._watcher.ask(said, in_code=in_code)

    def close(self, *, clean: bool = True) -> None:
        """Say no more; `clean`: this rank has done all that it should."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            if clean:
                self.enter("ended")
            watcher.close(clean=clean)
        self._cell.close()
