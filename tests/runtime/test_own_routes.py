"""Schedules with routes of their own, any number, through stages in any order, train and evaluate as one process."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from quintsched.import_user_code import load_schedule
from quintsched.ir.instruction_set import Bwd, Fwd
from quintsched.schedules import Order, Schedule, Shape
from quintsched.solve import solve
from quintsched.solve.order_search import PlacementSearch

from .grid import Case, require_equality

Ways = Sequence[Sequence[int]]

CHIMERA = f"{Path(__file__).parents[2] / 'examples' / 'chimera.py'}:chimera"  # loaded in its tests, not for all


def along(placed: Sequence[int], ways: Ways, *, parts: Sequence[int] | None = None) -> Schedule:
    """Return a schedule with a route along each way, whose microbatches come in turn: GPipe, in order of time."""

    def routes(shape: Shape) -> Iterator[tuple[Sequence[int], range]]:
        return ((way, range(number, shape.microbatches, len(ways))) for number, way in enumerate(ways))

    def order(rank: int, shape: Shape) -> Order:
        steps = [
            (place, kind(stage, microbatch))
            for stages, microbatches in routes(shape)
            for kind, way in ((Fwd, stages), (Bwd, stages[::-1]))
            for place, stage in enumerate(way, start=100 * (kind is Bwd))
            for microbatch in microbatches
            if placed[stage] == rank
        ]
        return (step for _, step in sorted(steps, key=lambda one: one[0]))

    return Schedule(
        "along", order, "", "", "", placement=lambda pp, chunks: tuple(placed), routes=routes,
        stage_to_part=None if parts is None else lambda shape: parts,
    )  # fmt: skip


CASES = {
    "chimera": (CHIMERA, "pp=4"),
    "chimera and replicas": (CHIMERA, "dp=2,pp=4"),
    "one route": (along([0, 1, 2], [[0, 1, 2]]), "pp=3"),
    "one route in another order": (along([0, 1, 2], [[2, 0, 1]]), "pp=3"),
    "the first goes up": (along([0, 1, 1, 0], [[1, 0], [3, 2]]), "pp=2"),
    "the first has the later stages": (along([0, 1, 1, 0], [[2, 3], [0, 1]], parts=[0, 1, 0, 1]), "pp=2"),
    "stages by turns": (along([0, 1, 1, 2, 2, 0], [[0, 2, 4], [1, 3, 5]]), "pp=3"),
    "three routes": (along([0, 1, 1, 2, 2, 0], [[1, 0], [3, 2], [5, 4]]), "pp=3"),
    "a piece in common": (along([0, 1, 0, 2], [[0, 1, 2], [0, 3, 2]]), "pp=3"),
    "the same way twice": (along([0, 1], [[0, 1], [0, 1]]), "dp=2,pp=2"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES)
def test_routes_train_and_evaluate_as_one_process(case: str) -> None:
    schedule, mesh = CASES[case]
    require_equality(Case(load_schedule(schedule) if isinstance(schedule, str) else schedule, mesh, 8, depth=6))


@pytest.mark.parametrize(("pp", "cap"), [(2, 2), (4, 3)])
def test_a_solved_order_that_goes_both_ways_trains_as_one_process(pp: int, cap: int, tmp_path: Path) -> None:
    def end_early(attempt: PlacementSearch, _: float) -> None:
        if attempt.origin != "one by one":
            raise KeyboardInterrupt

    found = solve(pp=pp, microbatches=8, placement="bidirectional", memory_cap=cap, effort=1, told=end_early)
    found.plan.save(tmp_path / "solved.json")
    require_equality(Case(str(tmp_path / "solved.json"), f"pp={pp}", 8))
