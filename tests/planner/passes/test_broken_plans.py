"""Passes: plans in which one instruction of a pass is wrong are refused; activations go to the host under a cap."""

from dataclasses import replace
from functools import partial

import pytest

import quintsched as qs
from quintsched import compiler
from quintsched.instructions import Compute, HostCopy, short
from quintsched.ir.diagnostics import Point
from quintsched.ir.instruction_set import (
    AllGatherBucket,
    AllReduceBucket,
    Bwd,
    FetchAct,
    FreeParams,
    Fwd,
    GatherParams,
    HoldAct,
    LendAct,
    OffloadAct,
    OptStep,
    Overlap,
    ReclaimAct,
    Recompute,
    RecvSkip,
    RecvSkipGrad,
    ReduceScatterBucket,
    ReturnAct,
    SendAct,
    SendSkip,
    SendSkipGrad,
    ShareMetrics,
    SyncTied,
)
from quintsched.ir.zero_setting import Zero
from quintsched.passes import FORWARD_PASSES, TRAIN_PASSES, Pass, place_loans
from tests.helpers.refusals import require_refusals
from tests.planner.verify.edits import Edit, add, drop, edited, every, move, put, swap
from tests.planner.verify.judge import Judge

RECOMPUTE = qs.compile("1f1b", mesh="pp=2", microbatches=2, recompute=1)
SLICES = qs.compile("seq-1f1b", mesh="pp=1", microbatches=1, slices=2, recompute=1)
TIED = qs.compile("1f1b", mesh="dp=2,pp=3", microbatches=3, tied={"a": (0, 1, 2), "embedding": (0, 2), "z": (0, 2)})
A, EMBEDDING, Z = (SyncTied(name, stages) for name, stages in TIED.tied.items())
OFFLOAD = qs.compile("1f1b", mesh="pp=2", microbatches=4, offload=1)
LEND = qs.compile("1f1b", mesh="pp=4", microbatches=4, lend=3)
SKIP = qs.compile("1f1b", mesh="pp=3", microbatches=2, skip={"h": (0, 2)})
ZERO_2, ZERO_3 = (qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2, zero=zero) for zero in (2, 3))
BOTH_WAYS = qs.compile("dualpipe", mesh="pp=2", microbatches=4)
INFERENCE = qs.compile("inference", mesh="pp=2", microbatches=2)
FIRST = Fwd(0, 0)


def scatter(**change: object) -> Edit:
    return every(ReduceScatterBucket, lambda i: [replace(i, **change)])


EDITS: list[tuple[qs.Plan, int, Edit, str]] = [
    (RECOMPUTE, 0, add(Recompute(0, 0), before=Bwd(0, 0)), "runs Recompute(stage=0, microbatch=0) 2 times instead of"),
    (RECOMPUTE, 0, drop(Recompute(0, 1)), "rank 0 runs Recompute(stage=0, microbatch=1) 0 times instead of once"),
    (RECOMPUTE, 0, move(Recompute(0, 1), after=Bwd(0, 1)), "needs the saved activations of stage 0, microbatch 1,"),
    (RECOMPUTE, 0, move(Recompute(0, 0), before=FIRST), "needs the checkpoint of stage 0, microbatch 0, made"),
    (SLICES, 0, move(Recompute(0, 1), after=FIRST), "needs the checkpoint of stage 0, microbatch 1, made only later"),
    (TIED, 0, drop(EMBEDDING), "which nothing on its rank makes"),
    (TIED, 0, move(Z, after=AllReduceBucket), "needs the tied gradient of stage 0, tie 3, made only later"),
    (TIED, 0, move(A, before=Bwd(0, 2)), "needs the weight gradient of stage 0, microbatch 2, made only later"),
    (TIED, 0, swap(EMBEDDING, Z), "all members must issue the same collectives in the same order"),
    (TIED, 0, move(A, after=Z), "close a circle"),
    (TIED, 0, add(A, before=OptStep), "makes the tied gradient of stage 0, tie 1 a second time"),
    (TIED, 0, put(Z, SyncTied("y", (0, 2))), "the plan ties no weight 'y'"),
    (TIED, 0, put(Z, SyncTied("z", (0, 1))), "it must name all stages that hold 'z': (0, 2)"),
    (TIED, 1, add(EMBEDDING, before=OptStep), "rank 1 holds none of these stages"),
    (OFFLOAD, 0, drop(OffloadAct), "FetchAct(stage=0, microbatch=0) needs the offloaded activations of stage 0"),
    (OFFLOAD, 0, drop(OffloadAct), "Fwd(stage=0, microbatch=0) makes the saved activations of stage 0, microbatch 0,"),
    (OFFLOAD, 0, drop(FetchAct), "OffloadAct(stage=0, microbatch=0) has already taken"),
    (OFFLOAD, 0, put(FetchAct, FetchAct(0, 0), FetchAct(0, 0)), "a second time"),
    (OFFLOAD, 0, put(OffloadAct, FetchAct(0, 0), OffloadAct(0, 0)), "made only later"),
    (OFFLOAD, 0, put(OffloadAct, OffloadAct(1, 0)), "stage 1 is on rank 1, not on rank 0"),
    (RECOMPUTE, 0, put(FIRST, FIRST, OffloadAct(0, 0), FetchAct(0, 0)), "stage 0 is recomputed: it drops its"),
    (LEND, 0, drop(LendAct), "rank 0 lends no activations of stage 0, microbatch "),
    (LEND, 0, drop(ReclaimAct), "LendAct(stage=0, microbatch=1, peer=3) makes the loan of activations of"),
    (LEND, 3, drop(HoldAct), "no partner for rank 0 instruction"),
    (LEND, 3, drop(ReturnAct), "HoldAct(stage=0, microbatch=1, peer=0) makes the lent activations of stage 0"),
    (LEND, 0, every(LendAct, lambda i: [replace(i, peer=2)]), "these activations to rank 2, and no rank 3 exchanges"),
    (LEND, 0, every(LendAct, lambda i: [replace(i, peer=0)]), "rank 0 lends to rank 0; name another pipeline rank"),
    (LEND, 0, move(ReclaimAct, after=Bwd(0, 1)), "needs the fetched activations of stage 0, microbatch 1, made only"),
    (LEND, 3, swap(HoldAct, ReturnAct), "made only later"),
    (LEND, 2, add(HoldAct(0, 1, 0), before=OptStep), "no rank 2 exchanges them with 0"),
    (
        RECOMPUTE,
        0,
        put(FIRST, FIRST, LendAct(0, 0, 1)),
        "stage 0 is recomputed: it drops its activations, and has none",
    ),
    (SKIP, 0, add(SendSkip(0, 0, 2, "k"), before=FIRST), "the plan has no skip 'k'"),
    (SKIP, 0, add(SendSkip(0, 0, 0, "h"), before=FIRST), "its peer is rank 0 itself"),
    (SKIP, 0, add(SendSkip(0, 0, 1, "h"), before=FIRST), "does not exchange the skip 'h' with rank 1, but with rank 2"),
    (SKIP, 0, add(RecvSkip(0, 0, 2, "h"), before=FIRST), "stage 0 exchanges nothing of the skip 'h' with another rank"),
    (SKIP, 0, add(SendSkipGrad(0, 0, 2, "h"), before=FIRST), "stage 0 exchanges nothing of the skip 'h' with a"),
    (SKIP, 0, add(RecvSkipGrad(0, 9, 2, "h"), before=FIRST), "microbatch 9 is out of range"),
    (BOTH_WAYS, 0, put(FIRST, Fwd(0, 3)), "the route of microbatch 3 does not visit stage 0"),
    (INFERENCE, 0, put(FIRST, Overlap((0, 0), (0, 1))), "there is no backward in a plan that only computes forward"),
    (RECOMPUTE, 0, put(FIRST, Overlap((0, 0), (0, 0))), "its two sides are one microbatch of one stage"),
    (LEND, 2, add(LendAct(0, 1, 3), before=OptStep), "peer=3): stage 0 is on rank 0, not on rank 2"),
    (ZERO_2, 0, scatter(axes=("ep",)), "the axes must be those of the replicas, ('dp',)"),
    (ZERO_2, 0, scatter(bucket=1), "bucket 1 is out of range: a stage has 1"),
    (ZERO_2, 0, scatter(part=2), "part 2 is out of range: the gradients of the stage have 2"),
    (ZERO_2, 0, scatter(stage=1), "stage 1 is on rank 1, not on rank 0"),
    (ZERO_2, 0, every(AllGatherBucket, lambda i: []), "makes the stepped shards of stage 0, bucket 0, and nothing on"),
    (ZERO_2, 0, move(ReduceScatterBucket, after=Bwd(0, 1)), "Bwd(stage=0, microbatch=1) needs the reduced gradient of"),
    (ZERO_3, 0, every(GatherParams, lambda i: []), "needs the full weights of stage 0, gathering 0, which nothing on"),
    (ZERO_3, 0, every(FreeParams, lambda i: []), "GatherParams(stage=0)"),
]


@pytest.mark.parametrize(("plan", "rank", "edit", "words"), EDITS, ids=[words[:60] for *_, words in EDITS])
def test_a_program_with_one_wrong_instruction(plan: qs.Plan, rank: int, edit: Edit, words: str) -> None:
    broken = edited(plan, rank, edit)
    assert words in broken.check(profile="blocking").explain()
    assert not Judge(broken).good
    assert plan.check().sound


UNSHARDED = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2)

HEADS: list[tuple[qs.Plan, dict[str, object], str]] = [
    (RECOMPUTE, {"recompute": (0, 1)}, "runs Recompute(stage=0, microbatch=0) 1 times instead of never"),
    (RECOMPUTE, {"recompute_microbatches": ((1,), (0, 1))}, "runs Recompute(stage=0, microbatch=0) 1 times instead"),
    (ZERO_2, {"zero": Zero()}, "where replicas share out nothing"),
    (ZERO_3, {"zero": Zero(2)}, "where replicas share out optimizer state, gradients"),
    (UNSHARDED, {"zero": Zero(1)}, "AllReduceBucket(stage=0, bucket=0, axes=dp): it has no place in a plan of ZeRO"),
]


@pytest.mark.parametrize(("plan", "head", "words"), HEADS, ids=[words for *_, words in HEADS])
def test_a_head_that_does_not_go_with_the_programs(plan: qs.Plan, head: dict[str, object], words: str) -> None:
    broken = replace(plan, **head)
    assert words in broken.check().explain()
    assert not Judge(broken).good


@pytest.mark.parametrize(
    ("after", "edit", "blamed", "point", "words"),
    [
        ("place-messages", drop(SendAct(0, 3, 1)), "culprit", "channels", "channel 0→1: 3 sends but 4 receives"),
        ("sync-tied", swap(SendAct(0, 0, 1), SendAct(0, 1, 1)), "culprit", "channels", "order is identity"),
        ("share-metrics", drop(ShareMetrics), "culprit", "collectives", "but rank 0 issues nothing"),
        ("reduce-buckets", drop(AllReduceBucket), "step-optimizer", "data flow", "the reduced gradient of stage 0"),
    ],
)
def test_a_pass_that_breaks_a_point_is_named(monkeypatch, after, edit, blamed, point, words):
    """The pass that declares what does not hold is named: for the data flow of reductions, that is the last one."""
    culprit = Pass("culprit", lambda plan: edited(plan, 0, edit), ())
    at = [step.name for step in TRAIN_PASSES].index(after) + 1
    monkeypatch.setattr(compiler, "TRAIN_PASSES", (*TRAIN_PASSES[:at], culprit, *TRAIN_PASSES[at:]))
    with pytest.raises(qs.UnsoundError) as error:
        qs.compile("gpipe", mesh="dp=2,pp=2", microbatches=4)
    assert f"the pass {blamed!r} breaks the point {point!r}: " in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize("passes", [TRAIN_PASSES, FORWARD_PASSES])
def test_all_passes_together_establish_soundness(passes):
    established = {point for step in passes for point in step.establishes}
    assert established == {*Point} - {Point.WELL_FORMED, Point.MEMORY}


def letters(plan: qs.Plan, rank: int) -> str:
    """A rank's computations and copies in a few letters."""
    return " ".join(short(i, with_stage=False) for i in plan.programs[rank] if isinstance(i, Compute | HostCopy))


def spans(simulation: qs.Simulation, rank: int) -> dict[str, tuple[float, float]]:
    return {short(s.instruction, with_stage=False): (s.start, s.end) for s in simulation.timeline[rank]}


def test_a_copy_begins_with_its_forwards_end_and_what_is_behind_its_place_waits() -> None:
    """By hand: a copy takes 3, a forward 1, a backward 2. The first backward comes at once: so the newest has to go."""
    plan = qs.compile("gpipe", mesh="pp=1", microbatches=3, offload=2)
    assert letters(plan, 0) == "F0 F1 OA1 F2 B0 FA1 B1 B2"
    found = spans(plan.simulate(qs.Costs(host_bandwidth=1 / 3)), 0)
    assert [found[name] for name in ("F0", "F1", "OA1", "F2")] == [(0, 1), (1, 2), (2, 5), (5, 6)]
    assert [found[name] for name in ("B0", "FA1", "B1", "B2")] == [(6, 8), (8, 11), (11, 13), (13, 15)]


def test_lending_halves_the_activations_of_1f1b_in_the_same_time() -> None:
    """As BPipe does (Kim et al., ICML 2023): at most ceil((p + 2) / 2) of them; messages are hidden by computations."""
    for pp, cap in ((4, 3), (6, 4), (8, 5), (16, 9)):
        compiled = partial(qs.compile, "1f1b", mesh=f"pp={pp}", microbatches=2 * pp)
        kept, lent, costs = compiled(), compiled(lend=cap), qs.Costs(p2p=0.05)
        assert (place_loans.least_cap(kept), max(lent.check().peak_activations)) == (cap, cap)
        assert lent.simulate(costs).makespan == pytest.approx(kept.simulate(costs).makespan, rel=1e-9)


def test_a_cap_that_is_too_small_names_the_least_that_works() -> None:
    after, uneven = qs.Costs(activation_after_input=0.0), qs.Costs(activation=(1.0, 2.5))
    sizes = {"mesh": "pp=2", "microbatches": 4}
    small = partial(qs.compile, "1f1b", **sizes)
    require_refusals(
        (r"1f1b: offload is 0.5, but .*; the least that works: 1$", lambda: small(mesh="pp=4", offload=0.5)),
        (r"the least that works: 0\.5", lambda: qs.compile("zbv", **sizes, offload=0, costs=after)),
        (r"the least that works: 2\.5", lambda: small(offload=2.0, costs=uneven)),
        (
            r"1f1b: lend is 2, but no other rank has room .*; the least that works: 3$",
            lambda: small(mesh="pp=4", lend=2),
        ),
        (r"the least that works: 2\.5", lambda: small(lend=2, costs=uneven)),
        ("lend: the plan only computes forward", lambda: qs.compile("inference", **sizes, lend=1)),
        ("offload: the plan only computes forward", lambda: qs.compile("inference", **sizes, offload=1)),
    )
    assert small(offload=2.5, costs=uneven)
    assert not small(mesh="pp=4", microbatches=8, offload=2, lend=3).layout.loans  # nothing is above it
    thirds = {"mesh": "pp=4", "microbatches": 12, "chunks": 3, "lend": 4.333333333}
    assert qs.compile("interleaved-1f1b", **thirds)  # as it is named: in ten digits
    both = small(mesh="pp=8", microbatches=8, offload=7, lend=5)  # what is on the host is not lent besides
    assert (len(both.layout.loans) > 0, max(both.check().peak_activations)) == (True, 5)
