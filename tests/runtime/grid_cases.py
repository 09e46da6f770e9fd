"""Cases of the grid, by pairs: any two entries of two columns that can be together are together in some case.

COLUMNS: schedules × meshes × models × what a plan has × how it is run ── pairs(seed) ──▶ CASES

    python -m tests.runtime.grid_cases --count 300 --seed 1000          more cases, from other seeds
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, cycle, islice
from random import Random
from typing import Any

import torch

import quintsched as qs

from ..helpers.drawn import judge_many
from .grid import LEAST, Case, differences, train
from .grid_models import (
    BY_PAIRS,
    EXPERTS,
    LAST_FIRST,
    MODELS,
    SHAPES,
    TIED,
    TRAINING,
    through_bare_csv,
    through_csv,
    through_file,
)

AXES = ("dp", "pp", "tp", "cp", "ep")
SCHEDULES: tuple[tuple[str | qs.Schedule, dict[str, Any]], ...] = (
    *((name, {}) for name in TRAINING if name not in ("bfs", "seq-1f1b", "hanayo")),
    ("bfs", {"chunks": 2}), ("hanayo", {"chunks": 4}), ("interleaved-zb", {"chunks": 3}),
    ("seq-1f1b", {"slices": 2}), ("seq-1f1b", {"slices": 4}), (LAST_FIRST, {}), (BY_PAIRS, {}),
)  # fmt: skip
SOME = [axes[k % n :] + axes[: k % n] for n in (1, 2, 3, 4) for k, axes in enumerate(combinations(AXES, n))]
MESHES = (
    "pp=1",
    *(",".join(f"{axis}=2" for axis in axes) for axes in SOME),
    "dp=2,ep=2,pp=2,cp=2,tp=2",
    "pp=3", "pp=4", "pp=8", "dp=4", "tp=4", "cp=4", "cp=3,pp=2", "dp=3,pp=2", "ep=4,dp=2",
)  # fmt: skip
OF_PLAN: tuple[dict[str, Any], ...] = (
    {}, {"buckets": 2}, {"recompute": 1, "every_second": True}, {"offload": LEAST},
    {"zero": 1, "buckets": 2}, {"zero": 2, "zero_every": 2}, {"zero": 3, "recompute": 1},
    {"communication": "ring"}, {"communication": "tree"}, {"communication": "auto", "zero": 2},
    {"overlap": True, "steps": 4}, {"through": through_file}, {"through": through_csv}, {"through": through_bare_csv},
)  # fmt: skip
OF_RUN: tuple[dict[str, Any], ...] = (
    {}, {"clip": 0.3, "bucket_mb": 0.004}, {"dtype": torch.float32, "clip": 0.5, "bucket_mb": 0.004},
    {"optimizer": "adam"}, {"optimizer": "adamw", "clip": 0.3}, {"optimizer": "adagrad", "wire": "mailbox"},
    {"uneven": True, "mean": True}, {"accumulates": True},
    {"sequence_parallel": True}, {"context": "gather"}, {"context": "ulysses", "clip": 0.3},
)  # fmt: skip
COLUMNS: tuple[tuple[Any, ...], ...] = (SCHEDULES, MESHES, MODELS, OF_PLAN, OF_RUN)


SHARES = {mesh: {axis: qs.Mesh.parse(mesh).axis_size(axis) for axis in AXES} for mesh in MESHES}


def settings_of(row: Sequence[int]) -> dict[str, Any]:
    """Return the fields of the case of an entry of each column."""
    (schedule, shape), mesh, model, of_plan, of_run = (column[k] for column, k in zip(COLUMNS, row, strict=True))
    pp = SHARES[mesh]["pp"]
    many = schedule == "dualpipe" or pp == 3 or (pp == 8 and "overlap" in of_plan)  # or nothing overlaps
    microbatches = 2 * pp if many else max(pp, 4)
    return {
        "schedule": schedule,
        "mesh": mesh,
        "microbatches": microbatches,
        "model": model,
        **shape,
        **of_plan,
        **of_run,
    }


def can_be(schedule: Any, mesh: str, model: str, **more: Any) -> bool:
    """Whether compiler and engine take a case; what they refuse is the business of other tests."""
    dp, pp, tp, cp, ep = SHARES[mesh].values()
    is_text, through = model not in SHAPES, more.get("through") in (through_csv, through_bare_csv)
    has_pairs = schedule in ("dualpipe", "dualpipe-v") or (schedule == "interleaved-1f1b" and pp > 1)
    own_batches = "uneven" in more or "accumulates" in more or "mean" in more
    return not (
        (schedule in ("dualpipe", "chimera") and (pp % 2 or model in TIED or through))
        or (schedule is LAST_FIRST and model in TIED)
        or (cp > 1 and (not is_text or "slices" in more))
        or ("slices" in more and (model not in ("gpt", "tied") or through))
        or ("sequence_parallel" in more and (tp == 1 or not is_text))
        or ("context" in more and cp == 1)
        or (more.get("context") == "ulysses" and 4 % (cp * tp))
        or (("zero" in more or "communication" in more) and dp * cp * ep == 1)
        or ("overlap" in more and (not has_pairs or "uneven" in more))
        or (own_batches and model in EXPERTS)
        or (through and model in TIED)
    )


def pairs(seed: int) -> Iterator[Case]:
    """Yield cases until every two entries of two columns are together in one, where they can be.

    Of schedules and meshes, which are the longest, those are together that happen to be.
    """
    random, sizes = Random(seed), [len(column) for column in COLUMNS]
    beside = [two for two in combinations(range(len(sizes)), 2) if two != (0, 1)]
    left = {(a, i, b, k) for a, b in beside for i in range(sizes[a]) for k in range(sizes[b])}

    def new(row: Sequence[int]) -> set[tuple[int, int, int, int]]:
        return {(a, row[a], b, row[b]) for a, b in beside} & left

    for a, i, b, k in random.sample(sorted(left), len(left)):
        if (a, i, b, k) not in left:
            continue
        rows = ([int(random.random() * size) for size in sizes] for _ in range(400))
        wanted = ([i if c == a else k if c == b else entry for c, entry in enumerate(row)] for row in rows)
        possible = [*islice((row for row in wanted if can_be(**settings_of(row))), 6)]
        left.discard((a, i, b, k))
        if possible:
            best = max(possible, key=lambda row: len(new(row)))
            left -= new(best)
            yield Case(**settings_of(best))


def pipelines() -> Iterator[Case]:
    """Yield every schedule on pipelines alone, each with something that must not change the order of additions."""
    neutral = [one for one in OF_PLAN if "communication" not in one and "zero" not in one and "overlap" not in one]
    for pp, dtype in ((2, torch.float64), (4, torch.float32)):
        for number, ((schedule, shape), more) in enumerate(zip(SCHEDULES, cycle(neutral), strict=False), start=pp):
            settings = {
                "schedule": schedule,
                "mesh": f"pp={pp}",
                "model": "gpt" if "slices" in shape else ("vit", "gpt", "own")[number % 3],
            }
            more = shape | (more if can_be(**settings, **shape, **more) else {})
            yield Case(microbatches=2 * pp, dtype=dtype, **settings, **more)


CASES = [*pairs(0)]
PIPELINES = [*pipelines()]
NAMED = [
    *(
        Case("1f1b", mesh, 2 if "dp=2" in mesh else 4, clip=1.0, steps=20)
        for mesh in ("dp=2", "tp=2", "pp=2", "dp=2,tp=2", "dp=2,pp=2", "pp=2,tp=2", "dp=2,pp=2,tp=2", "pp=4")
    ),
    Case("titan", "pp=2", 8, file="titan_2-rank_9920276.csv"),
    Case("titan-comms", "pp=2", 4, file="titan_example_interleaved_2rank_4mb_comms.csv"),
    Case("zb1p-comms", "pp=2", 8, file="zb1p_2rank_2stagep_comms.csv"),
    Case("dualpipev-file", "pp=4", 10, file="dualpipev_4rank_10mb.csv"),
    Case("titan", "pp=8", 10, file="titan_8-rank_9920276.csv"),
    Case("1f1b", "pp=2", 4, recompute=(1, 0)),
    Case("1f1b", "pp=2", 4, recompute=(0, 1), every_second=True, offload=1),
    Case("interleaved-1f1b", "pp=3", 6, overlap=True, lend=3.5, accumulates=True),
    Case("eager-1f1b", "pp=3,tp=2", 6, model="gpt", sequence_parallel=True, lend=4),
    Case("eager-1f1b", "cp=2,pp=3", 6, model="gpt", lend=4),
    Case("hanayo", "dp=2,pp=3", 6, zero=3, lend=2.5, bucket_mb=0.004, dtype=torch.float32, uneven=True),
    Case("hanayo", "ep=2,pp=3", 6, model="experts", lend=2.5),
    *(
        Case(name, "pp=2,tp=2", 6, model="gpt", overlap=True, offload=LEAST)
        for name in ("dualpipe", "interleaved-1f1b")
    ),
    Case("1f1b", "pp=4", 8, model="tied", lend=3, optimizer="adamw", wire="mailbox"),
    Case("1f1b", "pp=2,tp=2", 4, model="gpt", recompute=3, sequence_parallel=True, depth=6),
    Case("interleaved-zb", "pp=1", 3, chunks=2, recompute=2, depth=6),
    Case("gpipe", "ep=2,pp=2", 4, model="experts", recompute=2, every_second=True, depth=6),
    Case("zb-h1", "dp=2,pp=2", 4, model="tied", recompute=2, zero=3, zero_every=2, clip=1.0, depth=6),
    Case("1f1b", "dp=4", 2, communication="two-level", nodes=2, bucket_mb=0.002, optimizer="adam", clip=0.5),
]
"""Cases that pairs leave out."""
ZBV = (0, 0, 1, 1, 1, 0)
UNEVEN = [
    Case(schedule, mesh, stages=stages, **{"model": "gpt", "clip": 0.5, "depth": 4} | more)
    for schedule, mesh, stages, more in (
        ("1f1b", "pp=4", (1, 2, 0, 2, 1, 0), {"where": (0, 0, 1, 2, 3, 3)}),
        ("gpipe", "pp=3", (1, 3, 2, 0), {"where": (0, 1, 1, 2)}),
        ("eager-1f1b", "pp=2", (1, 4, 1), {"where": (0, 0, 1)}),
        ("bfs", "pp=2", (1, 5, 0), {"where": (0, 1, 0)}),
        ("interleaved-1f1b", "pp=4", (1, 1, 1, 1, 0, 1, 1), {"where": (0, 1, 2, 3, 0, 1, 2)}),
        ("interleaved-1f1b", "pp=2,tp=2", (1, 2, 1, 2, 0), {"where": (0, 0, 1, 0, 1), "overlap": True}),
        ("interleaved-zb", "pp=2", (1, 5, 0), {"where": (0, 1, 0)}),
        ("zb-h1", "pp=3", (2, 0, 3, 1), {"where": (0, 1, 1, 2)}),
        ("zb-h2", "pp=2", (3, 3, 0), {"where": (0, 1, 1)}),
        ("zb-auto", "pp=2", (1, 2, 3), {"where": (0, 0, 1)}),
        ("zbv", "pp=2", (1, 1, 0, 2, 2, 0), {"where": ZBV, "model": "tied"}),
        ("v-half", "pp=2", (1, 2, 0, 2, 1), {"where": (0, 1, 1, 0, 0)}),
        ("v-min", "pp=2", (2, 4, 0), {"where": (0, 1, 0)}),
        ("dualpipe", "pp=2,tp=2", (1, 5, 0, 1, 5, 0), {"where": ZBV, "overlap": True}),
        ("dualpipe-v", "pp=2", (1, 1, 0, 2, 2, 0), {"where": ZBV, "overlap": True}),
        ("seq-1f1b", "pp=3", (3, 0, 3), {"slices": 2, "microbatches": 3}),
        ("zb-h1", "pp=3", (1, 3, 2), {"recompute": (1, 2, 2)}),
        ("zb-h1", "dp=2,pp=3", (5, 1, 0), {"zero": 3}),
        ("1f1b", "dp=2,pp=3", (4, 0, 2), {"zero": 2, "recompute": 1, "communication": "ring"}),
        ("zb-h1", "pp=3,tp=2", (4, 0, 2), {"sequence_parallel": True}),
        ("1f1b", "cp=2,pp=3", (5, 1, 0), {}),
    )
]
"""Stages of as many blocks as the plan says, also of none."""


def draw(seed: int) -> Case:
    """Return a case of a seed."""
    return next(pairs(seed))


def judge(case: Case) -> tuple[str, str]:
    """Return "equal", "refused" or "unequal", and a word on it."""
    try:
        ranks = train(case)
    except qs.QuintschedError as error:
        return "refused", str(error).splitlines()[0]
    worst = max(differences(ranks, case.alone()).values())
    return "equal" if worst <= case.tolerance else "unequal", f"{worst:.1e}"


if __name__ == "__main__":
    judge_many(draw, judge, __doc__)
