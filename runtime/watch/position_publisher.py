"""Publisher of a rank's position while it runs: one store per instruction, a few per phase.

publisher.enter("step", step=12, program=0)    a phase begins, until the next
with publisher.phase("save"): …                a temporary phase; then the previous one again
numbers[INDEX] = 17                            the interpreter, before each call
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar
from weakref import ref

from quintsched.stalls.last_reported_rank_states import Phase

from .position_in_shared_memory import (
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
    PositionCell,
    WaitCell,
)

if TYPE_CHECKING:
    from quintsched.plan import Plan

    from .watch_thread import Answer, Watcher

Thing = TypeVar("Thing")
_END = object()
_UNKNOWN = 0, None
NUMBER_OF: dict[Phase, int] = {phase: number for number, phase in enumerate(PHASES)}


class Publisher:
    """A rank's interface to the watch; without a watcher nothing is sent.

    Attributes:
        numbers: the cell's memory, for stores in hot loops.
    """

    def __init__(self, cell: PositionCell | None = None, watcher: Watcher | None = None) -> None:
        self._cell = cell or PositionCell(0, shared=False)
        self.numbers = self._cell.numbers
        self._watcher = watcher
        self._programs: dict[int, tuple[int, ref[Plan]]] = {}
        self._num_programs = 0
        self._walked: Callable[[], Plan | None] = lambda: None

    def follow_waits(self, waits: WaitCell) -> None:
        """Move a wait cell's number into the rank's cell."""
        waits.move(self.numbers, WAIT)

    def enter(self, phase: Phase, *, step: int | None = None) -> None:
        """Publish that a phase begins; `step`: the training step that begins with it, counted from 1."""
        numbers = self.numbers
        numbers[INDEX] = NOWHERE
        numbers[WAIT] = NOTHING
        numbers[PHASE] = NUMBER_OF[phase]
        numbers[ENTERED] += 1
        if step is not None:
            numbers[STEP] = step

    def walk(self, plan: Plan) -> None:
        """Publish that the program of a plan begins."""
        if self._walked() is not plan:
            self._walked, self.numbers[PROGRAM] = ref(plan), self.number_of(plan)
        self.numbers[RUN] += 1

    @contextmanager
    def phase(self, phase: Phase, step: int | None = None) -> Iterator[None]:
        """Publish a phase for the block, and the previous one after it; an error leaves the phase unchanged."""
        before = PHASES[self.numbers[PHASE]]
        self.enter(phase, step=step)
        yield
        self.enter(before)

    def fetching(self, batches: Iterable[Thing]) -> Iterator[Thing]:
        """Yield batches; while each is fetched, this rank is in the phase "data"."""
        left = iter(batches)
        while True:
            with self.phase("data"):
                batch = next(left, _END)
            if batch is _END:
                return
            yield batch  # type: ignore[misc]

    def number_of(self, plan: Plan) -> int:
        """Return a plan's number: the number of other plans that this rank ran before it."""
        number, known = self._programs.get(id(plan), _UNKNOWN)
        if known is None or known() is not plan:
            number, self._num_programs = self._num_programs, self._num_programs + 1
            self._programs = {key: value for key, value in self._programs.items() if value[1]() is not None}
            self._programs[id(plan)] = number, ref(plan)
            if self._watcher is not None:
                self._watcher.tell_program(number, plan)
        return number

    def tell_first(self, plan: Plan | None) -> None:
        """Register the run's own plan, if it is known, so that it gets the first number."""
        if plan is not None:
            self.number_of(plan)

    @contextmanager
    def waiting_for_all(self) -> Iterator[None]:
        """Publish, during the block, a wait for all other ranks: before there are groups to name."""
        self.numbers[WAIT] = WORLD_CODE
        yield
        self.numbers[WAIT] = NOTHING

    def tell_group(self, ranks: tuple[int, ...]) -> None:
        """Report a new group: the k-th, counted from 0, is number k in wait codes."""
        if self._watcher is not None:
            self._watcher.tell_group(ranks)

    def note_longer(self, nbytes: int, index: int) -> None:
        """Publish that an instruction sends a message that is longer than its earlier ones."""
        self.numbers[SENT], self.numbers[SENT_AT] = nbytes, index

    def note_room(self, nbytes: int) -> None:
        """Publish that a message of this many bytes can be received."""
        self.numbers[ROOM] = max(self.numbers[ROOM], nbytes)

    def begin_batch(self, samples: int, length: int, targets: int) -> None:
        """Publish the size of another batch: samples, sequence length, rows of targets; 0: unknown."""
        numbers = self.numbers
        numbers[GIVEN] += 1
        numbers[GIVEN + 1], numbers[GIVEN + 2], numbers[GIVEN + 3] = samples, length, targets

    def note_given(self, samples: int, length: int, targets: int) -> None:
        """Publish further sizes of this rank's batch; 0: unchanged."""
        for beside, number in enumerate((samples, length, targets), 1):
            if number:
                self.numbers[GIVEN + beside] = number

    def fail(self, error: BaseException) -> None:
        """Report the error that ends this rank."""
        if self._watcher is not None:
            self._watcher.tell_error(error)

    def has_said(self, error: BaseException) -> bool | None:
        """Return whether the hub has printed this rank's error, so that the rank need not.

        False: no, as all ranks have this error; None: unknown. Takes a few seconds at most.
        """
        return None if self._watcher is None else self._watcher.has_said(error)

    def explain_failed_wait(self, said: str, *, in_code: bool = False) -> Answer | None:
        """Report that a wait for other ranks failed, and return the verdict; None: there is none.

        `in_code`: user code waited; the message is empty where the error is this rank's own. Takes a few
        seconds at most.
        """
        return None if self._watcher is None else self._watcher.ask(said, in_code=in_code)

    def close(self, *, clean: bool = True) -> None:
        """Stop publishing; `clean`: this rank has finished its work."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            if clean:
                self.enter("ended")
            watcher.close(clean=clean)
        self._cell.close()
