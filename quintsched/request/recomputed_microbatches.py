"""Microbatches that recomputing stages recompute, as settings name them, and as a plan stores them.

    "0-2"        of every stage that recomputes: 0, 1 and 2           a plan stores, for recompute 1,1,0:
    "0-2;5;"     of stage 0: 0, 1, 2; of stage 1: 5; of stage 2: none      ((0, 1, 2), (5,), ())
    None         all of them                                               ()

In Python and in job files they are lists as well: [0, 1, 2], or one list for each stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from quintsched.errors import UsageError, quoted
from quintsched.ir.mesh import whole_number
from quintsched.request.read_setting_values import read_whole_number, read_wholes

if TYPE_CHECKING:
    from quintsched.ir.layout import Route
    from quintsched.plan import Plan

Chosen = tuple[tuple[int, ...], ...]
"""Microbatches per stage, as a plan stores them."""

Wanted = tuple[int, ...] | Chosen
"""Microbatches of all stages that recompute, or of each stage."""

MOST_NAMED = 2**20
"""Maximum number of microbatches that a text names for a stage."""

WORDS = "give microbatches of all stages that recompute, [0, 1] or 0-1, or for each stage: [[0, 1], []] or 0-1;"


def read_recomputed(name: str, value: object) -> Wanted | None:
    """Read microbatches for all stages, or a list for each; raises `UsageError`."""
    if value is None:
        return None
    if isinstance(value, str):
        of_stages = [tuple(_parse_ranges(name, value, part)) for part in value.split(";")]
        return tuple(of_stages) if ";" in value else of_stages[0]
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        entries = tuple(value)
        if entries and all(whole_number(entry) is None for entry in entries):
            return tuple(read_wholes(name, entry) for entry in entries)
        return tuple(read_whole_number(name, entry) for entry in entries)
    number = whole_number(value)
    if number is None:
        raise UsageError(f"{name} is {quoted(value)}; {WORDS}")
    return (number,)


def _parse_ranges(name: str, text: str, part: str) -> Iterable[int]:
    """Yield the numbers of "0-2,5"; none of ""."""
    for piece in part.split(",") if part.strip() else ():
        first, dash, last = (word.strip() for word in piece.partition("-"))
        ends = (first, last) if dash else (first, first)
        whole = all(end.isdecimal() and len(end) <= 9 for end in ends)
        if not whole or not 0 <= int(ends[1]) - int(ends[0]) < MOST_NAMED:
            raise UsageError(f"{name}: cannot read {quoted(text)}; {WORDS}")
        yield from range(int(ends[0]), int(ends[1]) + 1)


def written(microbatches: Sequence[int]) -> str:
    """Return microbatches as text with ranges: "0-2,5"."""
    starts = [at for at, number in enumerate(microbatches) if not at or number != microbatches[at - 1] + 1]
    runs = [(microbatches[one], microbatches[other - 1]) for one, other in pairwise([*starts, len(microbatches)])]
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def chosen_per_stage(asked: Wanted | None, recompute: Sequence[int], routes: Sequence[Route], slices: int) -> Chosen:
    """Return what a plan stores: the microbatches of each stage; () if stages that recompute do so for all."""
    if asked is None:
        return ()
    visits: list[set[int]] = [set() for _ in recompute]
    for route in routes:
        for stage in range(len(recompute)):
            visits[stage].update(unit // slices for unit in route.microbatches if stage in route.stages)
    known = set[int]().union(*visits)
    chosen = tuple(one for one in asked if isinstance(one, tuple))
    if not chosen:
        wanted = [one for one in asked if isinstance(one, int)]
        chosen = tuple(
            tuple(one for one in wanted if every and (one in mine or one not in known))
            for every, mine in zip(recompute, visits, strict=True)
        )
    whole = tuple(tuple(sorted(mine)) if every else () for every, mine in zip(recompute, visits, strict=True))
    return () if chosen == whole else chosen


def repeated(chosen: Chosen, microbatches: int, others: int) -> Chosen:
    """Return the choice for another number of microbatches: the first ones of it, or all of them again and again."""
    return tuple(
        tuple(number for number in range(others) if number % microbatches in some) for some in map(frozenset, chosen)
    )


def chosen_in(value: Wanted | None, plan: Plan) -> object:
    """Return microbatches as the plan stores them."""
    if not plan.recompute:
        return value
    return chosen_per_stage(value, plan.recompute, plan.routes, plan.schedule.slices)
