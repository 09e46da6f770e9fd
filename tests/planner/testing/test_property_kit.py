"""`quintsched.testing`: it accepts what is sound, and shrinks what is not to the smallest shape, in words."""

import pytest

from quintsched.ir.instruction_set import Bwd, Fwd, Overlap
from quintsched.schedules import Order, Schedule, Shape
from quintsched.schedules.kit import stage_placements
from quintsched.testing import assert_sound
from tests.helpers.refusals import require_refusals

FEW = {"pp": range(1, 5), "microbatches": range(1, 7), "max_examples": 20}


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


def smallest(name: str, shape: str) -> str:
    return f"{name} fails; the smallest shape that does: {shape}"


def test_slices_and_chunks_are_explored():
    seen = set()

    def order(rank: int, shape: Shape) -> Order:
        seen.add((shape.pp, shape.chunks, shape.slices, shape.microbatches))
        for stage in shape.stages_of(rank):
            yield from (Fwd(stage, unit) for unit in range(shape.num_units))
        for stage in reversed(shape.stages_of(rank)):
            yield from (Bwd(stage, unit) for unit in reversed(range(shape.num_units)))

    mine = own(order, placement=stage_placements.v, max_chunks=3, max_slices=2)
    assert_sound(mine, pp=[1, 2], microbatches=2, chunks=[1, 3], slices=[1, 2])
    assert seen == {(pp, chunks, slices, 2) for pp in (1, 2) for chunks in (1, 3) for slices in (1, 2)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("pp", "microbatches"), [(1, 7), (3, 4), (4, 1)])
def test_it_is_the_smallest_wherever_it_lies(pp, microbatches):
    """Only shapes with at least so many ranks and microbatches fail: exactly that one is shown."""

    def fails(rank: int, shape: Shape) -> Order:
        yield from one_by_one(rank, shape)
        if shape.pp >= pp and shape.microbatches >= microbatches:
            yield Bwd(rank, 0)

    lines = failure(own(fails), pp=range(1, 5), microbatches=range(1, 8), max_examples=150)
    plural = "" if microbatches == 1 else "es"
    assert lines[0] == smallest("mine", f"pp={pp}, 1 chunk, {microbatches} microbatch{plural}")


def test_a_schedule_that_overlaps_is_tried_both_ways():
    def order(rank: int, shape: Shape) -> Order:
        """1F1B with each forward beside a backward, and so twice as many forwards before."""
        if not shape.overlap:
            yield from one_by_one(rank, shape)
            return
        first = min(2 * (shape.pp - rank) - 1, shape.microbatches)
        yield from (Fwd(rank, m) for m in range(first))
        yield from (Overlap((rank, m), (rank, m - first)) for m in range(first, shape.microbatches))
        yield from (Bwd(rank, m) for m in range(shape.microbatches - first, shape.microbatches))

    assert_sound(own(order, overlaps=True), **FEW)

    def forgets(rank: int, shape: Shape) -> Order:
        return list(order(rank, shape))[: -1 if shape.overlap and shape.pp == 2 else None]

    assert failure(own(forgets, overlaps=True), **FEW)[0] == (
        smallest("mine", "pp=2, 1 chunk, 1 microbatch, with overlap")
    )


def test_shapes_that_are_not_taken_are_passed_over_and_sizes_that_make_no_sense_refused():
    odd = own(one_by_one, constraint=lambda shape: "too even" if shape.microbatches % 2 == 0 else None)
    assert_sound(odd, pp=[1, 2], microbatches=range(1, 8))
    assert failure(odd, pp=[1, 2], microbatches=[2, 4]) == ["mine takes none of the 8 shapes; mine: too even"]
    require_refusals(
        ("give 1 to 100000", lambda: assert_sound("1f1b", pp=[])),
        ("give 1 to 10000", lambda: assert_sound("1f1b", pp=range(1, 1000), microbatches=range(1, 1000))),
        ("unknown schedule", lambda: assert_sound("1f2b")),
    )
