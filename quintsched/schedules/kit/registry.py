"""Registry of schedules: a new one is a decorated generator.

    @schedule("1f1b")                             # and, for people to read: summary="…", bubble="…", memory="…"
    def one_f_one_b(rank: int, shape: Shape) -> Order:
        yield Fwd(rank, 0) …

A schedule only yields the order of computations of a rank. Passes add messages, reductions and the optimizer.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property

from quintsched.check_call_arguments import FUNCTION, SEVERAL, TEXT, WHOLE_NUMBER, takes
from quintsched.errors import QuintschedError, UnsoundError, UsageError, counted, quoted, suggest
from quintsched.ir.instruction_columns import Flags
from quintsched.ir.instruction_set import Compute, Overlap
from quintsched.ir.layout import recomputed_units
from quintsched.ir.mesh import whole_number
from quintsched.ir.plan_data import Mode
from quintsched.schedules.kit.stage_placements import linear
from quintsched.simulation.costs import Costs

Order = Iterable[Compute | Overlap]
"""Type of a schedule's result: the computations of one rank in order, or overlapped pairs of them."""
Placement = Callable[[int, int], tuple[int, ...]]

Routing = Callable[["Shape"], Iterable[tuple[Iterable[int], Iterable[int]]]]

MAX_MICROBATCHES = 2**20
MAX_CHUNKS = 2**12
MAX_SLICES = 2**12


@dataclass(frozen=True)
class Shape:
    """Arguments of a schedule: `pp` ranks, `microbatches`, and the placement of stages."""

    pp: int
    microbatches: int
    chunks: int
    stage_to_pp: tuple[int, ...]
    slices: int = 1
    """Slices of a microbatch along the sequence; instructions then count slices."""
    costs: Costs = field(default_factory=Costs)
    """Costs to plan with, for schedules that search."""
    memory_cap: float | None = None
    """Maximum of activations that a rank may hold, in microbatches of a whole rank, for schedules that search."""
    recompute: tuple[int, ...] = ()
    """Recompute setting per stage (0: none), for schedules that yield `Recompute` themselves; () if none does.
    Those that a schedule leaves out are placed right before the backward."""
    recompute_microbatches: tuple[tuple[int, ...], ...] = ()
    """Microbatches that each stage recomputes; () if those that recompute do so for all."""
    overlap: bool = False
    """Whether paired forwards and backwards are yielded as one `Overlap`, for schedules that have such pairs."""

    @property
    def num_units(self) -> int:
        """Number of units that instructions count: microbatches x slices."""
        return self.microbatches * self.slices

    @cached_property
    def _stages(self) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in range(self.pp)]
        for stage, rank in enumerate(self.stage_to_pp):
            found[rank].append(stage)
        return tuple(map(tuple, found))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages on `rank`, in ascending order."""
        return self._stages[rank]

    @cached_property
    def recomputing(self) -> Flags:
        """Mask (stages, units) of the forwards that are recomputed."""
        sizes = len(self.stage_to_pp), self.num_units, self.slices
        return recomputed_units(self.recompute, self.recompute_microbatches, *sizes)

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, one.name) for one in fields(self)))

    def __hash__(self) -> int:
        return self._hash  # computed once: schedules that search look up the same shape for each rank


@dataclass(frozen=True)
class Schedule:
    """Named order of computation, with its properties.

    `order(rank, shape)` yields the computations of one rank; `constraint(shape)` returns what is wrong with
    a shape and which sizes work, or None. `bubble` and `memory` are formulas for people to read; "": not stated.
    """

    name: str
    order: Callable[[int, Shape], Order]
    summary: str = ""
    bubble: str = ""
    memory: str = ""
    aliases: tuple[str, ...] = ()
    mode: Mode = "train"
    placement: Placement = linear
    min_chunks: int = 1
    max_chunks: int = 1
    max_slices: int = 1
    searches: bool = False
    """Whether the order depends on costs and a memory cap."""
    bidirectional: bool = False
    """Whether half of the microbatches go in the opposite direction: each piece of the model is then held twice."""
    routes: Routing | None = None
    """Routes of a shape's microbatches, if not the default: (stages, microbatches) for each, in the numbers that
    instructions use. A piece of the model that is on several routes is held once per route."""
    stage_to_part: Callable[[Shape], Iterable[int]] | None = None
    """Piece of the model that each stage holds; None: its position on its route."""
    any_placement: bool = False
    """Whether the order runs with any placement: it then gets a user's placement unchanged."""
    overlaps: bool = False
    """Whether it has pairs of forwards and backwards that can overlap: it then reads `Shape.overlap`."""
    constraint: Callable[[Shape], str | None] = lambda _shape: None

    def __repr__(self) -> str:
        return f"Schedule({self.name}{f': {self.summary}' if self.summary else ''})"

    @property
    def built_in(self) -> bool:
        """Whether it is a schedule of this package."""
        return str(getattr(self.order, "__module__", "")).startswith("quintsched.schedules.")

    @property
    def several_chunks(self) -> range:
        """Range of the fewest chunks that it takes and the next two: the default of a proof over shapes."""
        return range(self.min_chunks, min(self.max_chunks, self.min_chunks + 2) + 1)

    @property
    def chunks_text(self) -> str:
        """Range of chunks as text."""
        if self.min_chunks == self.max_chunks:
            return str(self.min_chunks)
        return f"{self.min_chunks} or more"

    def shape(
        self,
        pp: int,
        microbatches: int,
        chunks: int | None,
        slices: int = 1,
        costs: Costs | None = None,
        memory_cap: float | None = None,
        *,
        overlap: bool = False,
    ) -> Shape:
        """Return the checked shape for these sizes; `chunks=None` takes the fewest.

        Raises `UsageError` for sizes that the schedule does not take, `UnsoundError` if its own code fails.
        """
        _check_range(self.name, "microbatches", microbatches, 1, MAX_MICROBATCHES)
        placed = self.placed(pp, chunks)
        chunks = self.min_chunks if chunks is None else chunks
        _check_range(self.name, "slices", slices, 1, self.max_slices)
        if not self.searches and (costs is not None or memory_cap is not None):
            raise UsageError(f"{self.name}: its order does not depend on costs or a memory cap; leave them out")
        if overlap and not self.overlaps:
            others = ", ".join(found.name for found in all_schedules() if found.overlaps)
            raise UsageError(
                f"{self.name}: overlap: it has no forward and backward side by side that do not wait for each other; "
                f"choose among {others}"
            )
        with own_code(f"{self.name} at pp={pp}, {counted(microbatches, 'microbatch')}, {counted(chunks, 'chunk')}"):
            shape = Shape(pp, microbatches, chunks, placed, slices, costs or Costs(), memory_cap, overlap=overlap)
            fault = self.constraint(shape)
        if fault:
            raise UsageError(f"{self.name}: {fault}")
        return shape

    def placed(self, pp: int, chunks: int | None) -> tuple[int, ...]:
        """Return the schedule's own placement; `chunks=None` takes the fewest.

        Raises `UsageError` for chunks that it does not take, `UnsoundError` if it fails or gives no valid ranks.
        """
        chunks = self.min_chunks if chunks is None else chunks
        _check_range(self.name, "chunks", chunks, self.min_chunks, self.max_chunks)
        with own_code(f"{self.name} at pp={pp}, {counted(chunks, 'chunk')}"):
            found = self.placement(pp, chunks)
        ranks = [whole_number(rank) for rank in found] if isinstance(found, Iterable) else []
        placed = tuple(rank for rank in ranks if rank is not None and 0 <= rank < pp)
        if not ranks or len(placed) != len(ranks):
            raise UnsoundError(
                f"{self.name}: for pp={pp} and {counted(chunks, 'chunk')} its placement gives {found!r}; it has to "
                f"give a pipeline rank from 0 to {pp - 1} for each stage"
            )
        return placed


@contextmanager
def own_code(where: str) -> Iterator[None]:
    """Turn an error of a schedule's code, `sys.exit` included, into an `UnsoundError` with the line that raised it."""
    try:
        yield
    except (QuintschedError, KeyboardInterrupt):
        raise
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}:{frame.lineno}"
        raise UnsoundError(f"{where}: the schedule failed at {place}: {type(error).__name__}: {error}") from error


def _check_range(name: str, what: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name}: {what} is {quoted(value)}; give a whole number")
    if not low <= value <= high:
        allowed = f"exactly {low}" if low == high else f"{low} to {high}"
        raise UsageError(f"{name}: {what} is {value}; this schedule takes {allowed}")


_REGISTRY: dict[str, Schedule] = {}


@takes(
    "@quintsched.schedule('my-schedule')",
    name=TEXT,
    summary=TEXT,
    bubble=TEXT,
    memory=TEXT,
    aliases=SEVERAL,
    mode=TEXT,
    placement=FUNCTION,
    min_chunks=WHOLE_NUMBER,
    max_chunks=WHOLE_NUMBER,
    max_slices=WHOLE_NUMBER,
    routes=FUNCTION,
    stage_to_part=FUNCTION,
    constraint=FUNCTION,
)
def schedule(
    name: str,
    *,
    summary: str = "",
    bubble: str = "",
    memory: str = "",
    aliases: tuple[str, ...] = (),
    mode: Mode = "train",
    placement: Placement = linear,
    min_chunks: int = 1,
    max_chunks: int = 1,
    max_slices: int = 1,
    searches: bool = False,
    bidirectional: bool = False,
    routes: Routing | None = None,
    stage_to_part: Callable[[Shape], Iterable[int]] | None = None,
    any_placement: bool = False,
    overlaps: bool = False,
    constraint: Callable[[Shape], str | None] = lambda _shape: None,
) -> Callable[[Callable[[int, Shape], Order]], Schedule]:
    """Register the decorated generator as a schedule; the fields are those of `Schedule`.

    Only the name is needed; without a `summary`, the first line of the generator's docstring is taken.
    Raises `UsageError` where another generator has the name; the same one may be defined again, as notebooks do.
    """

    @takes("@quintsched.schedule('my-schedule') above a generator", order=FUNCTION)
    def register(order: Callable[[int, Shape], Order]) -> Schedule:
        made = Schedule(
            name=name,
            order=order,
            summary=summary or (order.__doc__ or "").partition("\n")[0].rstrip("."),
            bubble=bubble,
            memory=memory,
            aliases=aliases,
            mode=mode,
            placement=placement,
            min_chunks=min_chunks,
            max_chunks=max_chunks,
            max_slices=max_slices,
            searches=searches,
            bidirectional=bidirectional,
            routes=routes,
            stage_to_part=stage_to_part,
            any_placement=any_placement,
            overlaps=overlaps,
            constraint=constraint,
        )
        for taken in (name, *aliases):
            _refuse_second(taken, order)
        _REGISTRY[name] = made
        return made

    return register


def _refuse_second(name: str, order: Callable[[int, Shape], Order]) -> None:
    for found in _REGISTRY.values():
        theirs = found.order
        same = (theirs.__module__, theirs.__qualname__) == (order.__module__, order.__qualname__)
        if name in (found.name, *found.aliases) and not same:
            raise UsageError(f"the schedule name {name!r} is taken by {theirs.__module__}.{theirs.__qualname__}")


def all_schedules() -> tuple[Schedule, ...]:
    """Return all registered schedules, in order of registration."""
    return tuple(_REGISTRY.values())


def find_schedule(name: str) -> Schedule:
    """Return the schedule of this name or alias; raises a `UsageError` that suggests the nearest one."""
    for found in _REGISTRY.values():
        if name == found.name or name in found.aliases:
            return found
    names = [known for found in _REGISTRY.values() for known in (found.name, *found.aliases)]
    raise UsageError(f"unknown schedule {quoted(name)}{suggest(name, names)}")
