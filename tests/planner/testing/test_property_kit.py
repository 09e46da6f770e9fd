"""`quintsched.testing`: it accepts what is sound, and shrinks what is not to the smallest shape, in words."""

import re
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import quintsched as qs
from quintsched.ir import placement
from quintsched.ir.instruction_set import Bwd, BwdInput, BwdWeight, Fwd, Overlap
from quintsched.schedules import Order, Schedule, Shape
from quintsched.testing import assert_plan_sound, assert_sound, costs, meshes, microbatch_counts, placements

FEW = {"pp": range(1, 5), "microbatches": range(1, 9), "max_examples": 30}


def own(order, **options) -> Schedule:
    return Schedule("mine", order, "", "", "", **options)


def one_by_one(rank: int, shape: Shape) -> Order:
    for microbatch in range(shape.microbatches):
        yield Fwd(rank, microbatch)
        yield Bwd(rank, microbatch)


def failure(schedule: Schedule | str, **sizes) -> list[str]:
    with pytest.raises(AssertionError) as found:
        assert_sound(schedule, **sizes)
    return str(found.value).splitlines()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [found.name for found in qs.all_schedules()])
def test_every_schedule_passes(name):
    assert_sound(name, pp=range(1, 5), microbatches=range(1, 9), max_examples=20)


def test_slices_and_chunks_are_explored():
    seen = set()

    def order(rank: int, shape: Shape) -> Order:
        seen.add((shape.pp, shape.chunks, shape.slices, shape.microbatches))
        for stage in shape.stages_of(rank):
            yield from (Fwd(stage, unit) for unit in range(shape.num_units))
        for stage in reversed(shape.stages_of(rank)):
            yield from (Bwd(stage, unit) for unit in reversed(range(shape.num_units)))

    mine = own(order, placement=placement.v, max_chunks=3, max_slices=2)
    assert_sound(mine, pp=[1, 2], microbatches=2, chunks=[1, 3], slices=[1, 2])
    assert seen == {(pp, chunks, slices, 2) for pp in (1, 2) for chunks in (1, 3) for slices in (1, 2)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("pp", "microbatches"), [(1, 1), (1, 9), (2, 7), (3, 5), (5, 1), (5, 9)])
def test_it_is_the_smallest_wherever_it_lies(pp, microbatches):
    """Only shapes with at least so many ranks and microbatches fail: exactly that one is shown."""

    def fails(rank: int, shape: Shape) -> Order:
        yield from one_by_one(rank, shape)
        if shape.pp >= pp and shape.microbatches >= microbatches:
            yield Bwd(rank, 0)

    lines = failure(own(fails), pp=range(1, 6), microbatches=range(1, 10), max_examples=500)
    plural = "" if microbatches == 1 else "es"
    assert lines[0] == f"mine fails; the smallest shape that does: pp={pp}, 1 chunk, {microbatches} microbatch{plural}"


def test_a_weight_half_before_its_input_half_is_shown():
    def hasty(rank: int, shape: Shape) -> Order:
        for microbatch in range(shape.microbatches):
            yield from (Fwd(rank, microbatch), BwdWeight(rank, microbatch), BwdInput(rank, microbatch))

    text = "\n".join(failure(own(hasty)))
    assert "pp=1, 1 chunk, 1 microbatch\n" in text
    assert "rank 0 is stuck at 1 BwdWeight(stage=0, microbatch=0): it needs the pending weight half" in text


def paired(rank: int, shape: Shape) -> Order:
    """1F1B with each forward beside a backward, and so twice as many forwards before."""
    first = min(2 * (shape.pp - rank) - 1, shape.microbatches)
    yield from (Fwd(rank, m) for m in range(first))
    yield from (Overlap((rank, m), (rank, m - first)) for m in range(first, shape.microbatches))
    yield from (Bwd(rank, m) for m in range(shape.microbatches - first, shape.microbatches))


def test_a_schedule_of_pairs_passes():
    assert_sound(own(paired), **FEW, memory=lambda rank, shape: min(2 * (shape.pp - rank), shape.microbatches))
    less = {"memory": lambda rank, shape: min(2 * (shape.pp - rank) - 1, shape.microbatches)}
    lines = failure(own(paired), **FEW, **less)
    assert lines[0] == "mine fails; the smallest shape that does: pp=1, 1 chunk, 2 microbatches"
    assert lines[2].startswith("memory: rank 0 holds up to 2 microbatches' activations"), "beside each other"
    assert lines[-1] == "rank 0 F0 F1&B0 -  B1 -"


def test_pairs_that_wait_for_each_other_are_shown():
    def hasty(rank: int, shape: Shape) -> Order:
        yield Fwd(rank, 0)
        yield from (Overlap((rank, m), (rank, m - 1)) for m in range(1, shape.microbatches))
        yield Bwd(rank, shape.microbatches - 1)

    lines = failure(own(hasty))
    assert lines[0] == "mine fails; the smallest shape that does: pp=2, 1 chunk, 2 microbatches"
    assert any("rank 0 is stuck at 1 Overlap(forward=(0, 1), backward=(0, 0)): it needs the" in line for line in lines)
    assert lines[-2:] == ["rank 0  F0 F1&B0 B1", "rank 1  F0 F1&B0 B1"]


def test_a_schedule_that_overlaps_is_tried_both_ways():
    def order(rank: int, shape: Shape) -> Order:
        return paired(rank, shape) if shape.overlap else one_by_one(rank, shape)

    assert_sound(own(order, overlaps=True), **FEW)

    def forgets(rank: int, shape: Shape) -> Order:
        return list(order(rank, shape))[: -1 if shape.overlap and shape.pp == 2 else None]

    lines = failure(own(forgets, overlaps=True), **FEW)
    assert lines[0] == "mine fails; the smallest shape that does: pp=2, 1 chunk, 1 microbatch, with overlap"


def test_the_memory_that_its_author_states():
    assert_sound("1f1b", pp=range(1, 5), memory=lambda rank, shape: min(shape.pp - rank, shape.microbatches))
    lines = failure("gpipe", **FEW, memory=lambda rank, shape: shape.pp - rank)
    assert lines[0] == "gpipe fails; the smallest shape that does: pp=1, 1 chunk, 2 microbatches"
    assert lines[2] == ("memory: rank 0 holds up to 2 microbatches' activations; the bound that its author states is 1")
    assert lines[-1] == "rank 0 F0 F1 B0 -  B1 -"


def test_a_failure_that_only_replicas_have_is_shown(monkeypatch):
    """A pass that reduces too little: the fault is the compiler's, and shows only with data parallelism."""
    from quintsched import compiler
    from quintsched.passes import TRAIN_PASSES

    fewer = tuple(step for step in TRAIN_PASSES if step.name != "reduce-buckets")
    monkeypatch.setattr(compiler, "TRAIN_PASSES", fewer)
    lines = failure(own(one_by_one))
    assert lines[0] == "mine fails; the smallest shape that does: pp=1, 1 chunk, 1 microbatch, 2 replicas"


def test_a_schedule_that_crashes_says_where():
    def crashes(rank: int, shape: Shape) -> Order:
        yield Fwd(rank, 1 // (shape.pp - 2))

    text = "\n".join(failure(own(crashes), pp=2))
    assert re.search(r"test_property_kit.py:\d+: ZeroDivisionError", text)


def test_shapes_that_a_schedule_does_not_take_are_passed_over():
    odd = own(one_by_one, constraint=lambda shape: "too even" if shape.microbatches % 2 == 0 else None)
    assert_sound(odd, pp=[1, 2], microbatches=range(1, 20))
    assert failure(odd, pp=[1, 2], microbatches=[2, 4]) == ["mine takes none of the 8 shapes; mine: too even"]


def test_sizes_that_make_no_sense():
    with pytest.raises(qs.UsageError, match="give 1 to 100000"):
        assert_sound("1f1b", pp=[])
    with pytest.raises(qs.UsageError, match="give 1 to 100000"):
        assert_sound("1f1b", pp=range(1, 1000), microbatches=range(1, 1000))
    with pytest.raises(qs.UsageError, match="unknown schedule"):
        assert_sound("1f2b")


def test_schedules_that_search_get_costs():
    seen = set()

    def order(rank: int, shape: Shape) -> Order:
        seen.add(shape.costs)
        return one_by_one(rank, shape)

    assert_sound(own(order, searches=True), pp=[1, 2], microbatches=[1, 2], max_examples=40)
    assert len(seen) > 5


@given(mesh=meshes(), microbatches=microbatch_counts())
def test_any_mesh_compiles(mesh, microbatches):
    assert mesh.pp <= 6
    assert mesh.size <= 64
    assert_plan_sound(qs.compile("1f1b", mesh=mesh, microbatches=microbatches))


@given(data=st.data(), pp=st.integers(1, 4))
def test_any_placement_of_a_breadth_first_order_is_sound(data, pp):
    where = data.draw(placements(pp))
    assert {*where} == {*range(pp)}

    def order(rank: int, shape: Shape) -> Order:
        for stage in shape.stages_of(rank):
            yield from (Fwd(stage, microbatch) for microbatch in range(shape.microbatches))
        for stage in reversed(shape.stages_of(rank)):
            yield from (Bwd(stage, microbatch) for microbatch in range(shape.microbatches))

    assert_plan_sound(qs.compile(own(order), mesh=qs.Mesh(pp=pp), microbatches=2, stage_to_pp=where))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), per_stage=st.booleans())
def test_any_costs_can_be_simulated(data, per_stage):
    drawn = data.draw(costs(num_stages=3 if per_stage else None))
    plan = qs.compile("1f1b", mesh="pp=3", microbatches=3)
    assert plan.simulate(drawn).makespan > 0


def test_one_plan_is_judged():
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=3)
    assert_plan_sound(plan, memory=[2, 1])
    with pytest.raises(AssertionError, match="rank 1 holds up to 1 microbatch's activations"):
        assert_plan_sound(plan, memory=[2, 0.5])
    broken = qs.Plan(**{name: getattr(plan, name) for name in plan.__dataclass_fields__} | {"programs": ((), ())})
    with pytest.raises(AssertionError, match="complete: rank 0 runs"):
        assert_plan_sound(broken)


@pytest.mark.processes
def test_without_hypothesis_it_says_what_to_install():
    code = (
        "import sys\n"
        "sys.modules['hypothesis'] = None\n"
        "import quintsched as qs\n"
        "try: import quintsched.testing\n"
        "except qs.UsageError as error: assert 'quintsched[testing]' in str(error)\n"
        "else: raise SystemExit('imported')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_schedule_that_gives_another_order_each_time_fails():
    asked: list[int] = []

    def fickle(rank: int, shape: Shape) -> Order:
        asked.append(rank)
        units = range(shape.microbatches)
        for unit in units if len(asked) % 3 else reversed(units):
            yield Fwd(rank, unit)
        for unit in units:
            yield Bwd(rank, unit)

    lines = failure(own(fickle), pp=range(1, 4), microbatches=range(1, 4))
    assert any("mine: asked twice for rank" in line for line in lines)


def test_a_schedule_that_quits_fails():
    def quits(rank: int, shape: Shape) -> Order:
        if shape.microbatches > 2:
            sys.exit(0)
        return one_by_one(rank, shape)

    assert "SystemExit: 0" in "\n".join(failure(own(quits), pp=1, microbatches=range(1, 5)))


def test_the_result_says_what_was_not_compared():
    free = assert_sound(own(one_by_one), pp=1, microbatches=range(1, 4))
    assert str(free) == (
        "mine: 6 shapes proved; not compared: memory (no bound is stated: give memory=lambda rank, shape: …)"
    )
    bound = assert_sound(own(one_by_one), pp=1, microbatches=range(1, 4), memory=lambda rank, shape: 1)
    assert (bound.shapes, bound.not_compared) == (6, ())
