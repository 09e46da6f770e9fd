"""Requests of small plans, drawn: any schedule at a shape that it takes, with any settings that go together.

schedule ─▶ ranks, chunks, microbatches, slices ─▶ placement, replicas ─▶ ZeRO, recomputation, ties, skips, …
"""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

import quintsched as qs
from tests.planner.verify.small_plans import BUILT_IN, LEAST_CAPS, LIGHT

REPLICAS = ("dp=2", "cp=3", "dp=2,ep=2", "dp=4,tp=2", "ep=2", "ep=2,cp=2")
PLAIN = ("schedule", "mesh", "microbatches", "chunks", "slices", "stage_to_pp", "stages")
"""Settings that decide what is computed in which order; but for costs, where a schedule searches."""


@st.composite
def requests(draw: st.DrawFn, schedules: Sequence[qs.Schedule] = tuple(BUILT_IN)) -> dict[str, Any]:
    """Draw the arguments of `compile`."""
    asked = draw(shapes(schedules))
    schedule, mesh = asked["schedule"], qs.Mesh.parse(asked["mesh"])
    trains, replicated = schedule.mode == "train", bool(mesh.replica_axes)
    stages = len(asked.get("stage_to_pp") or schedule.placed(mesh.pp, asked["chunks"]))
    if replicated:
        asked |= {"zero": draw(st.integers(0, 3)) if trains else 3 * draw(st.integers(0, 1))}
        asked |= {"zero_every": draw(st.integers(1, 4))} if asked["zero"] > 1 and trains else {}
        asked |= {"communication": draw(st.sampled_from(["native", "native", "ring", "auto"]))} if trains else {}
        asked["buckets_per_stage"] = draw(st.integers(1, 3))
    if trains:
        per_stage = st.lists(st.integers(0, 2), min_size=stages, max_size=stages)
        asked["recompute"] = draw(st.sampled_from([0, 0, 1]) | per_stage)
        if asked["recompute"] and asked["recompute"] != [0] * stages and draw(st.booleans()):
            last = asked["microbatches"] - 1
            asked["recompute_microbatches"] = sorted({0, last} | draw(st.sets(st.integers(0, last))))
    if not schedule.bidirectional and stages > 1:
        several = st.sets(st.integers(0, stages - 1), min_size=2).map(sorted)
        names = st.sampled_from(["embedding", "head", "norm"])
        asked["tied"] = draw(st.just({}) | st.dictionaries(names, several, max_size=2)) if trains else {}
        asked["skip"] = draw(st.just({}) | st.dictionaries(names, several, max_size=2))
        asked["losses"] = draw(st.sampled_from([None, [stages // 2 - 1, stages - 1]]))
    asked["overlap"] = schedule.overlaps and draw(st.booleans())
    if draw(st.booleans()):
        empty = not (asked.get("skip") or asked.get("losses"))
        size = stages // 2 if schedule.bidirectional else stages
        blocks = st.lists(st.integers(1 - empty, 3), min_size=size - 1, max_size=size - 1)
        asked["stages"] = [draw(st.integers(1, 3)), *draw(blocks)] * (stages // size)
    if trains and draw(st.booleans()):
        free = qs.compile(**asked, **({"costs": LIGHT} if schedule.searches else {}))
        moves = draw(st.sampled_from(sorted(LEAST_CAPS)))
        asked |= {"costs": LIGHT, moves: LEAST_CAPS[moves](free, LIGHT) + draw(st.sampled_from([0.0, 0.25, 1.0, 2.0]))}
    return asked


@st.composite
def shapes(draw: st.DrawFn, schedules: Sequence[qs.Schedule]) -> dict[str, Any]:
    """Draw a schedule, and ranks, microbatches and a placement that it takes."""
    schedule = draw(st.sampled_from(schedules))
    pp = draw(st.integers(1, 4)) if not schedule.bidirectional else 2 * draw(st.integers(1, 2))
    slices = draw(st.integers(1, min(schedule.max_slices, 3)))
    chunks = draw(st.integers(schedule.min_chunks, min(schedule.max_chunks, max(schedule.min_chunks, 3))))
    chunks = chunks if any(taken(schedule, pp, pp * number, chunks, slices) for number in (1, 2)) else None
    counts = [number for number in range(1, 13) if taken(schedule, pp, number, chunks, slices)]
    where = draw(st.sampled_from(["", *REPLICAS]))
    asked = {"schedule": schedule, "mesh": ",".join([*[where] * bool(where), f"pp={pp}"])}
    asked |= {"microbatches": draw(st.sampled_from(counts)), "chunks": chunks, "slices": slices}
    if draw(st.integers(0, 2)) == 0:
        other = draw(uneven(schedule.placed(pp, chunks), 2 if schedule.bidirectional else 1))
        try:
            qs.compile(**asked, stage_to_pp=other)
            asked["stage_to_pp"] = other
        except qs.UsageError:
            pass
    return asked


def taken(schedule: qs.Schedule, pp: int, microbatches: int, chunks: int | None, slices: int) -> bool:
    try:
        return bool(schedule.shape(pp, microbatches, chunks, slices))
    except qs.UsageError:
        return False


def uneven(stage_to_pp: Sequence[int], ways: int) -> st.SearchStrategy[list[int]]:
    """Draw a placement in which some stages are runs of several, or missing, on all ways through the model alike."""
    size = len(stage_to_pp) // ways
    counts = st.lists(st.sampled_from([1, 1, 2, 0]), min_size=size, max_size=size)
    return counts.map(lambda found: [pp for pp, n in zip(stage_to_pp, found * ways, strict=True) for _ in range(n)])
