"""Makespan, span and memory of the schedules: published tables, closed forms, and a second simulation."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from independent import orders_of, peaks, times

import quintsched as qs
from quintsched.plan import Plan
from quintsched.schedules import all_schedules

TABLE = json.loads((Path(__file__).parents[1] / "data" / "schedules_unit_cost.json").read_text())["rows"]
NAMES = {"GPipe": "gpipe", "1F1B": "1f1b", "Interleaved1F1B": "interleaved-1f1b"}
ROWS = [row for row in TABLE if row["schedule"].split()[0] in NAMES]

BUILT_IN = [found.name for found in all_schedules()]
PP, CHUNKS, MICROBATCHES = range(1, 9), range(1, 5), range(1, 33)


def makespan(name: str, P: int, v: int, M: int) -> Fraction:
    if name == "inference":
        return Fraction((v - 1) * max(M, P) + M + P - 1, v)
    return 3 * M + Fraction(3 * (P - 1), v)


def peak(name: str, P: int, v: int, M: int, r: int) -> Fraction:
    return {
        "gpipe": Fraction(M),
        "1f1b": Fraction(min(P - r, M)),
        "interleaved-1f1b": min(Fraction(2 * (P - r - 1) + (v - 1) * P + 1, v), Fraction(M)),
        "inference": Fraction(0),
    }[name]


def takes(name: str, P: int, v: int, M: int) -> bool:
    if name == "interleaved-1f1b":
        return v >= 2 and M % P == 0
    return v == 1 or name == "inference"


def test_every_row_of_ours_is_tested():
    assert {(NAMES[row["schedule"].split()[0]], row["pp"]) for row in ROWS} == {
        (name, pp) for name in ("gpipe", "1f1b", "interleaved-1f1b") for pp in (4, 8)
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['schedule']}-{row['pp']}-{row['microbatches']}")
def test_published_table(row):
    name = NAMES[row["schedule"].split()[0]]
    simulation = qs.compile(
        name, mesh=qs.Mesh(pp=row["pp"]), microbatches=row["microbatches"], chunks=row["chunks"]
    ).simulate()
    assert simulation.makespan == row["makespan"]
    assert simulation.span == row["span"]
    assert simulation.busy == (row["ideal"],) * row["pp"]
    assert simulation.bubble == 1 - row["ideal"] / row["makespan"]
    assert simulation.span_bubble == 1 - row["ideal"] / row["span"]
    assert list(simulation.peak_activations) == row["peaks"]
    assert max(simulation.peak_activations) == row["peak_activations"]


def test_the_closed_forms_know_every_schedule():
    for name in BUILT_IN:
        assert peak(name, 4, 2, 4, 0) >= 0


@pytest.mark.parametrize("pp", PP)
@pytest.mark.parametrize("name", BUILT_IN)
def test_sound_and_equal_to_the_closed_forms_in_every_shape(name, pp):
    for chunks in CHUNKS:
        for microbatches in MICROBATCHES:
            if not takes(name, pp, chunks, microbatches):
                with pytest.raises(qs.UsageError):
                    qs.compile(name, mesh=qs.Mesh(pp=pp), microbatches=microbatches, chunks=chunks)
                continue
            assert_closed_forms(qs.compile(name, mesh=qs.Mesh(pp=pp), microbatches=microbatches, chunks=chunks))


def assert_closed_forms(plan: Plan) -> None:
    simulation, name = plan.simulate(), plan.schedule.name
    P, v, M = plan.mesh.pp, plan.schedule.chunks, plan.schedule.microbatches
    assert simulation.makespan == float(makespan(name, P, v, M)), plan.title
    assert simulation.peak_activations == tuple(float(peak(name, P, v, M, rank)) for rank in range(P)), plan.title


@pytest.mark.parametrize("pp", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8, 15])
def test_a_second_simulation_agrees(pp, chunks, microbatches):
    unit = [Fraction(1, chunks)] * (pp * chunks)
    for name in ("gpipe", "1f1b", "interleaved-1f1b", "inference"):
        if takes(name, pp, chunks, microbatches):
            plan = qs.compile(name, mesh=qs.Mesh(pp=pp), microbatches=microbatches, chunks=chunks)
            ends = times(orders_of(plan), plan.stage_to_pp, unit, [2 * u for u in unit])
            assert max(ends.values()) == makespan(name, pp, chunks, microbatches)
            assert peaks(plan) == [peak(name, pp, chunks, microbatches, rank) for rank in range(pp)]


@pytest.mark.parametrize(
    ("microbatches", "nearest"), [(1, "works: 4$"), (3, "works: 4$"), (6, "works: 4 or 8$"), (31, "works: 28 or 32$")]
)
def test_interleaved_names_the_nearest_sizes(microbatches, nearest):
    with pytest.raises(qs.UsageError, match=nearest):
        qs.compile("interleaved-1f1b", mesh="pp=4", microbatches=microbatches)


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 2), ("1f1b", 2), ("interleaved-1f1b", 1), ("inference", 0)])
def test_chunks_that_a_schedule_does_not_take(name, chunks):
    with pytest.raises(qs.UsageError, match=f"{name}: chunks is {chunks}; this schedule takes"):
        qs.compile(name, mesh="pp=4", microbatches=8, chunks=chunks)


@pytest.mark.parametrize("name", ["gpipe", "afab", "1f1b", "interleaved-1f1b", "inference"])
@pytest.mark.parametrize("microbatches", [0, -1, 2**40, True, 2.5])
def test_microbatches_out_of_range(name, microbatches):
    with pytest.raises(qs.UsageError, match="microbatches"):
        qs.compile(name, mesh="pp=2", microbatches=microbatches)
