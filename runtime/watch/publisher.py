"""What a rank says of itself while it runs: a store per instruction, a few per phase.

publisher.enter("step", step=12, program=0)    phases: from here on, until the next
with publisher.phase("save"): …                the same for a while; then what it was before
numbers[INDEX] = 17                            the interpreter, before each call
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from quintsched.stalls.states import Phase

from .cell import (
    COLLECTIVE,
    ENTERED,
    INDEX,
    NOTHING,
    NOWHERE,
    PHASE,
    PHASES,
    PROGRAM,
    RUN,
    STEP,
    UNKNOWN,
    WAIT,
    Cell,
    wait_code,
)

if TYPE_CHECKING:
    from quintsched.plan import Plan

NUMBER_OF: dict[Phase, int] = {phase: number for number, phase in enumerate(PHASES)}


class Listener(Protocol):
    """Who passes on what cannot be read in a cell: the rank's watcher."""

    def tell_program(self, number: int, plan: Plan) -> None:
        """Pass on that a plan goes by this number."""

    def tell_group(self, number: int, ranks: tuple[int, ...]) -> None:
        """Pass on that a group of ranks goes by this number."""

    def tell_error(self, error: BaseException) -> None:
        """Pass on that this rank's own work failed."""

    def ask(self, said: str) -> str | None:
        """Pass on that a wait for other ranks failed, as `said`; return the verdict, None where there is none."""

    def close(self, *, clean: bool) -> None:
        """Hang up; `clean` says that this rank has done all it should."""


class Publisher:
    """One rank's side of the watch; without a listener nobody hears of it.

    Attributes:
        numbers: the cell's, for stores in hot loops.
        calm: what is stored at WAIT when a wait has ended: that the rank waits for nothing, or, where a device waits
            in its host's stead, that nobody knows.
    """

    def __init__(self, cell: Cell | None = None, listener: Listener | None = None, *, host_waits: bool = True) -> None:
        self._cell = cell or Cell(0, shared=False)
        self.numbers = self._cell.numbers
        self.calm = NOTHING if host_waits else UNKNOWN
        self._listener = listener
        self._programs: WeakKeyDictionary[Plan, int] = WeakKeyDictionary()
        self._num_programs = 0
        self._groups: dict[tuple[int, ...], int] = {}

    def enter(self, phase: Phase, *, step: int | None = None) -> None:
        """Say that a phase begins; `step`: the number of the training step that begins with it, the first is 1."""
        numbers = self.numbers
        numbers[INDEX] = NOWHERE
        numbers[WAIT] = self.calm
        numbers[PHASE] = NUMBER_OF[phase]
        numbers[ENTERED] += 1
        if step is not None:
            numbers[STEP] = step

    def walk(self, plan: Plan) -> None:
        """Say that the program of a plan begins."""
        self.numbers[PROGRAM] = self.number_of(plan)
        self.numbers[RUN] += 1

    @contextmanager
    def phase(self, phase: Phase, step: int | None = None) -> Iterator[None]:
        """Say that a phase begins, and, behind the block, that the one before goes on; an error leaves it as it is."""
        before = PHASES[self.numbers[PHASE]]
        self.enter(phase, step=step)
        yield
        self.enter(before)

    def number_of(self, plan: Plan) -> int:
        """Return the number that a plan goes by: how many others this rank ran before it."""
        number = self._programs.get(plan)
        if number is None:
            number = self._programs[plan] = self._num_programs
            self._num_programs += 1
            if self._listener is not None:
                self._listener.tell_program(number, plan)
        return number

    def wait_for_group(self, ranks: tuple[int, ...]) -> int:
        """Return what is stored at WAIT while this rank waits for a collective of a group."""
        number = self._groups.get(ranks)
        if number is None:
            number = self._groups[ranks] = len(self._groups)
            if self._listener is not None:
                self._listener.tell_group(number, ranks)
        return wait_code(COLLECTIVE, number)

    def fail(self, error: BaseException) -> None:
        """Say that this rank's own work failed."""
        if self._listener is not None:
            self._listener.tell_error(error)

    def explain(self, said: str) -> str | None:
        """Say that a wait for other ranks failed, and return whose fault it was, in words; None: nobody says.

        Takes a few seconds at most.
        """
        return None if self._listener is None else self._listener.ask(said)

    def close(self, *, clean: bool = True) -> None:
        """Say no more; `clean`: this rank has done all that it should."""
        listener, self._listener = self._listener, None
        if listener is not None:
            if clean:
                self.enter("ended")
            listener.close(clean=clean)
        self._cell.close()
