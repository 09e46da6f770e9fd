"""The checker against a second opinion: a run with rendezvous that shares no code with it."""

import re
from collections import Counter
from dataclasses import replace
from itertools import permutations, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quintsched as qs
from quintsched.graph.transport_profiles import PROFILES
from quintsched.ir.instruction_set import Bwd, Compute, Fwd, Instruction, Message, Overlap, Recv, RecvAct, Send
from quintsched.plan import Plan
from quintsched.schedules import Order, Schedule, Shape
from quintsched.verify.equivalence import equivalence
from quintsched.verify.soundness import Point
from tests.planner.verify.judge import Judge
from tests.planner.verify.judge_hosts import Hosts
from tests.planner.verify.mutants import any_mutant, reordered, with_program
from tests.planner.verify.small_plans import DRAWN, EACH, OVERLAPPING, TIED, any_plan, plans_up_to

PIPELINES = [recipe for recipe in DRAWN if recipe.mesh.pp > 1]
PARTS = 32


@st.composite
def mutants(draw: st.DrawFn) -> Plan:
    """A plan with 1 to 4 faults, or with changes that do no harm."""
    return any_mutant(draw(st.sampled_from(DRAWN)).plan, draw(st.randoms(use_true_random=False)))


def assert_agreement(plan: Plan) -> None:
    """The verdict and the run agree on soundness, and on deadlock wherever the checker says anything about it.

    So do hosts that launch collectives, on NCCL and on gloo. What is sound computes the sequential gradient, as algebra
    has it.
    """
    verdict, run = plan.check(profile="blocking"), Judge(plan)
    assert verdict.sound == run.good, (verdict.explain(), run.finished, run.faults)
    if verdict.profiles:
        assert verdict.profiles["blocking"] == run.finished, verdict.explain()
    if not run.finished:
        assert not verdict.sound
    assert not verdict.sound or equivalence(plan).holds, equivalence(plan).explain()
    if not any(finding.point is Point.DATA_FLOW for finding in verdict.findings) and verdict.profiles:
        free = list(verdict.profiles.values())
        assert free == sorted(free), "a stricter transport is free where a laxer one is not"
        for profile in ("channel", "tagged"):
            assert verdict.profiles[profile] == Hosts(plan, profile).finish(), verdict.explain()


@settings(max_examples=500)
@given(plan=mutants())
def test_checker_and_run_agree_on_mutants(plan):
    assert_agreement(plan)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_checker_and_run_agree_on_a_hundred_thousand_mutants(seed):
    """2,600 each, of all schedules there are: 104,000 in about five minutes of one core."""
    random = Random(seed)
    for _ in range(2600):
        assert_agreement(any_mutant(any_plan(DRAWN, random), random))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_checker_and_run_agree_on_twenty_thousand_mutants_of_pairs(seed):
    """2,500 each, of plans in which forwards run beside backwards; those that are sound have pairs, most of them."""
    random, sound = Random(seed), Counter[bool]()
    for _ in range(2500):
        plan = any_mutant(any_plan(OVERLAPPING, random), random)
        assert_agreement(plan)
        if plan.check(profile="blocking").sound:
            sound[len(plan.columns.rows_where(Overlap)) > 0] += 1
    assert sound[True] > 200, sound


def test_checker_and_run_agree_on_orders_of_collectives_across_groups():
    random, free = Random(0), Counter[bool]()
    for _ in range(60):
        plan = reordered(any_plan(TIED, random), random)
        assert_agreement(plan)
        free[plan.check().profiles.get("channel", False)] += 1
    assert min(free[True], free[False]) > 10, free


def test_checker_and_run_agree_on_every_pair_of_a_small_plan():
    """A forward beside each of the next backwards, at either place."""
    plan, sound = qs.compile("dualpipe-v", mesh="pp=2", microbatches=4), 0
    for rank, program in enumerate(plan.programs):
        forwards, backwards = ([at for at, i in enumerate(program) if type(i) is kind] for kind in (Fwd, Bwd))
        for at, k in product(forwards, backwards):
            pair = Overlap(*((i.stage, i.microbatch) for i in (program[at], program[k])))
            for place, gone in ((at, k), (k, at)) if abs(at - k) < 10 else ():
                changed = list(program)
                changed[place] = pair
                del changed[gone]
                mutant = with_program(plan, rank, changed)
                assert_agreement(mutant)
                sound += mutant.check(profile="blocking").sound
    assert sound > 5


def test_mutants_offend_against_every_point():
    random = Random(0)
    verdicts = [any_mutant(any_plan(DRAWN, random), random).check(profile="blocking") for _ in range(200)]
    points = {finding.point for verdict in verdicts for finding in verdict.findings}
    assert points == {*Point} - {Point.MEMORY}
    assert sum(verdict.sound for verdict in verdicts) > 8, "some changes do no harm"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_checker_and_run_agree_on_every_single_swap_and_drop(part):
    for plan in plans_up_to(30, EACH)[part::PARTS]:
        for rank, program in enumerate(plan.programs):
            for i in range(len(program)):
                assert_agreement(with_program(plan, rank, [*program[:i], *program[i + 1 :]]))
                for j in range(i):
                    swapped = list(program)
                    swapped[i], swapped[j] = swapped[j], swapped[i]
                    assert_agreement(with_program(plan, rank, swapped))


def test_checker_and_run_agree_on_the_swaps_of_a_small_plan():
    plan = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2)
    seen = set()
    for rank, program in enumerate(plan.programs):
        for i in range(len(program)):
            for j in range(i):
                swapped = list(program)
                swapped[i], swapped[j] = swapped[j], swapped[i]
                mutant = with_program(plan, rank, swapped)
                assert_agreement(mutant)
                seen.add(mutant.check(profile="blocking").explain().split(":")[0])
                seen.update(finding.point for finding in mutant.check(profile="blocking").findings)
    assert seen >= {"sound", "not sound", Point.DEADLOCK, Point.DATA_FLOW, Point.CHANNELS, Point.COLLECTIVES}


def test_checker_and_run_agree_on_every_order_of_the_end():
    """Metrics (the loss weight), the norm of reduced gradients, the step: one order is sound, with bucket and metrics
    free to change places."""
    plan = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2)
    sound = []
    for order in permutations(range(4)):
        programs = tuple((*p[:-4], *(p[-4:][k] for k in order)) for p in plan.programs)
        mutant = replace(plan, programs=programs)
        assert_agreement(mutant)
        if mutant.check(profile="blocking").sound:
            sound.append([i.op for i in programs[0][-4:]])
    assert sound == [
        ["AllReduceBucket", "ShareMetrics", "ClipGrad", "OptStep"],
        ["ShareMetrics", "AllReduceBucket", "ClipGrad", "OptStep"],
    ]


def most_waiting(plan: Plan) -> int:
    """Return the most messages of a channel that a rank has received and not taken, in program order."""
    most = 0
    for program in plan.programs:
        waiting: dict[tuple[type[Instruction], int, int], int] = {}
        for i in program:
            if isinstance(i, Recv):
                waiting[Fwd if isinstance(i, RecvAct) else Bwd, i.stage, i.microbatch] = i.peer
                most = max(most, *Counter(waiting.values()).values())
            elif isinstance(i, Compute):
                waiting.pop((type(i), i.stage, i.microbatch), None)
        assert not waiting
    return most


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "inference"])
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_messages_come_just_in_time(name, pp):
    plans = [qs.compile(name, mesh=qs.Mesh(pp=pp), microbatches=m) for m in (pp, 2 * pp, 4 * pp)]
    assert max(map(most_waiting, plans)) == (2 if name == "interleaved-1f1b" else 1)


def test_at_most_two_messages_of_a_channel_wait_to_be_taken():
    """The second rank has twice the work, so that the first one runs ahead."""

    def order(rank: int, shape: Shape) -> Order:
        return (Fwd(stage, m) for m in range(shape.microbatches) for stage in shape.stages_of(rank))

    heavy = Schedule("heavy", order, "", "", "", mode="forward", placement=lambda pp, chunks: (0, 1, 1))
    plan = qs.compile(heavy, mesh="pp=2", microbatches=8)
    assert Judge(plan).good
    assert most_waiting(plan) == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "inference"])
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
def test_what_is_compiled_runs_under_rendezvous(name, pp):
    for microbatches in {1, 2, pp, 2 * pp, 4 * pp} if name != "interleaved-1f1b" else {pp, 2 * pp, 4 * pp}:
        plan = qs.compile(name, mesh=qs.Mesh(dp=2, pp=pp), microbatches=microbatches)
        run = Judge(plan)
        assert run.good, (plan.title, run.faults)
        assert plan.check(profile="blocking").profiles == dict.fromkeys(PROFILES, True)


def test_receives_just_before_and_sends_just_after_a_pair_are_judged_alike(careless):
    for name, pp in (("dualpipe-v", 2), ("dualpipe-v", 4), ("interleaved-1f1b", 2), ("interleaved-1f1b", 3)):
        plan = careless(qs.compile(name, mesh=qs.Mesh(pp=pp), microbatches=2 * pp, overlap=True))
        assert_agreement(plan)


def test_receive_before_use_and_send_after_deadlocks_in_35_of_40_shapes(careless):
    deadlocked = 0
    for pp in range(2, 7):
        for microbatches in range(1, 9):
            plan = careless(qs.compile("1f1b", mesh=qs.Mesh(pp=pp), microbatches=microbatches))
            assert_agreement(plan)
            deadlocked += not plan.check(profile="blocking").profiles["blocking"]
            assert plan.check(profile="channel").sound
    assert deadlocked == 35


def events_of(plan: Plan) -> dict[tuple[int, int], object]:
    """Return what each (rank, index) is one event with: the k-th message of its channel."""
    found: dict[tuple[int, int], object] = {}
    for rank, program in enumerate(plan.programs):
        counts: dict[tuple[int, int], int] = {}
        for index, i in enumerate(program):
            found[rank, index] = (rank, index)
            if isinstance(i, Send | Recv):
                channel = (rank, i.peer) if isinstance(i, Send) else (i.peer, rank)
                counts[channel] = counts.get(channel, 0) + 1
                found[rank, index] = (channel, counts[channel])
    return found


@pytest.mark.parametrize(
    ("name", "mesh", "m"), [("1f1b", "pp=2", 3), ("1f1b", "pp=6", 8), ("interleaved-1f1b", "pp=4", 8)]
)
def test_a_cycle_is_a_cycle(careless, name, mesh, m):
    """Each line goes forward in its rank's program, and ends at the event at which the next line begins."""
    plan = careless(qs.compile(name, mesh=mesh, microbatches=m))
    assert_cycle(plan)


@given(data=st.data())
def test_a_cycle_of_a_mutant_is_a_cycle(data):
    plan = data.draw(st.sampled_from(PIPELINES)).plan
    rank = data.draw(st.integers(0, plan.mesh.pp - 1))
    program = list(plan.programs[rank])
    messages = [index for index, i in enumerate(program) if isinstance(i, Message)]
    index, other = (data.draw(st.sampled_from(messages)) for _ in range(2))
    program.insert(other, program.pop(index))
    plan = with_program(plan, rank, program)
    if plan.check(profile="blocking").profiles.get("blocking") is False:
        assert_cycle(plan)


def assert_cycle(plan: Plan) -> None:
    verdict = plan.check(profile="blocking")
    head, *lines = [finding for finding in verdict.findings if finding.point is Point.DEADLOCK]
    assert f"'blocking' {len(lines)} waits close a circle" in head.message
    event = events_of(plan)
    steps = []
    for line in lines:
        found = re.fullmatch(r"rank (\d+): (\d+) (.+) must end before (\d+) (.+) can begin", line.message)
        assert found
        rank, first, last = int(found[1]), int(found[2]), int(found[4])
        assert first < last
        assert found[3] == str(plan.programs[rank][first])
        assert found[5] == str(plan.programs[rank][last])
        assert (line.rank, line.index) == (rank, first), "where the rank stands is marked"
        steps.append((event[rank, first], event[rank, last]))
    for (_, end), (begin, _) in zip(steps, [*steps[1:], steps[0]], strict=True):
        assert end == begin
    assert all(line.message in verdict.explain() for line in lines), "the whole cycle is shown"


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_has_its_verdict(plan, profile):
    assert plan.check(profile=profile).sound


def test_an_unknown_profile_is_wrong_usage(plan):
    with pytest.raises(qs.UsageError, match="did you mean 'channel'"):
        plan.check(profile="chanel")


def test_memory_cap(plan):
    assert plan.check(memory_cap=2).sound
    verdict = plan.check(memory_cap=1.5)
    assert [finding.point for finding in verdict.findings] == [Point.MEMORY]
    assert "rank 0 holds up to 2 microbatches' activations; the cap is 1.5" in verdict.explain()
    for cap in (-1.0, float("nan")):
        with pytest.raises(qs.UsageError, match="memory cap"):
            plan.check(memory_cap=cap)


def test_a_verdict_marks_the_cells():
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
    program = list(plan.programs[1])
    del program[1]
    verdict = with_program(plan, 1, program).check()
    assert not verdict.sound
    assert ">1B0<" in verdict.explain()
    with pytest.raises(qs.UnsoundError, match="rank 1 runs Fwd"):
        verdict.raise_if_unsound()


def test_a_value_that_comes_too_late_is_one_fault():
    plan = qs.compile("1f1b", mesh="pp=1", microbatches=1)
    forward, backward, *rest = plan.programs[0]
    verdict = with_program(plan, 0, [backward, forward, *rest]).check(profile="blocking")
    assert [finding.point for finding in verdict.findings] == [Point.DATA_FLOW]
    assert "made only later, by rank 0 instruction 1" in verdict.explain()


def test_a_sound_plan_says_why_it_is_not_free_under_stricter_profiles():
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=3)
    first = list(plan.programs[0])
    send, receive = (next(k for k, i in enumerate(first) if str(i).startswith(name)) for name in WAITING)
    first[send], first[receive] = first[receive], first[send]
    verdict = with_program(plan, 0, first).check()
    assert verdict.sound
    assert set(verdict.cycles) == {name for name, free in verdict.profiles.items() if not free} >= {"blocking"}
    head, *reasons = verdict.explain().splitlines()
    assert "free of deadlock under" in head
    assert reasons[0].startswith("not free under blocking")
    assert "rank 0: " in reasons[0]
    assert "must end before" in reasons[0]
    assert plan.check().cycles == {}


WAITING = ("SendAct(stage=0, microbatch=1", "RecvGrad(stage=0, microbatch=0")
