"""Makespan, span and memory of the schedules: published tables, closed forms, and a second simulation."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quintsched as qs
from quintsched.schedules import find_schedule

DATA = Path(__file__).parents[2] / "data"
UNIT_COST = json.loads((DATA / "schedules_unit_cost.json").read_text())["rows"]
PUBLISHED = json.loads((DATA / "zero_bubble_published.json").read_text())["rows"]
NAMES = {
    **{"GPipe": "gpipe", "1F1B": "1f1b", "Eager1F1B": "eager-1f1b", "LoopedBFS": "bfs", "Seq1F1B": "seq-1f1b"},
    **{"Interleaved1F1B": "interleaved-1f1b", "InterleavedZeroBubble": "interleaved-zb"},
    **{"ZB-H1": "zb-h1", "ZB-H2": "zb-h2"},
}
PAIRED = {"ZBV": "zbv", "DualPipe": "dualpipe", "DualPipeV": "dualpipe-v"}
"""Schedules whose number of chunks is given."""

FORMS = [*NAMES.values(), "inference"]
"""The schedules whose closed forms stand here."""

ELSEWHERE = {"zbv", "v-half", "v-min", "dualpipe-v", "dualpipe", "chimera", "hanayo", "zb-auto"}
"""The V-shaped, bidirectional and searched schedules have tests of their own."""

PP, CHUNKS, SLICES, MICROBATCHES = range(1, 9), range(1, 5), range(1, 4), range(1, 33)
FEW = (*range(1, 10), 15, 16, 17, 32)


@dataclass(frozen=True)
class Case:
    """A schedule with P ranks, v chunks, q slices and M microbatches, under the costs F, I and W."""

    name: str
    P: int
    v: int
    q: int
    M: int
    F: int = 1
    I: int = 1  # noqa: E741
    W: int = 1

    @property
    def taken(self) -> bool:
        """Whether the schedule takes this shape."""
        if self.name.startswith("interleaved") and self.M % self.P:
            return False
        least = 2 if self.name.startswith("interleaved") or self.name == "bfs" else 1
        most = self.v if least == 2 or self.name == "inference" else 1
        return least <= self.v <= most and (self.q == 1 or self.name == "seq-1f1b")

    @property
    def ideal(self) -> int:
        """Time of each rank's computations."""
        return self.M * (self.F if self.name == "inference" else self.F + self.I + self.W)

    def idle(self) -> tuple[Fraction, Fraction]:
        """Return the excess of makespan and longest span over that."""
        D, F, I, W = self.P - 1, self.F, self.I, self.W  # noqa: E741
        behind = max(self.P - self.M, 0)
        match self.name:
            case "inference":
                waits = Fraction((self.v - 1) * behind * F, self.v)
                return waits + Fraction(D * F, self.v), waits
            case "bfs":
                idle = Fraction(((self.v - 1) * behind + D) * (F + I + W), self.v)
                return idle, idle
            case "zb-h1" | "interleaved-zb":
                filled = min(self.P, self.M) - 1
                makespan, span = D * (F + I) - filled * min(F, I, W), D * (F + I) - filled * min(F, W)
                return Fraction(makespan, self.v), Fraction(span, self.v)
            case "zb-h2":
                filled = min(2 * self.P - 1, self.M) - 1
                full, half = divmod(filled, 2)
                rising = D * (F + I) - filled * min(F, W)
                makespan = max(rising, D * F + (D - full) * I - half * min(F, I, W))
                span = max(rising, (D - full) * (F + I) - half * min(F, W))
                return Fraction(makespan), Fraction(span)
            case _:
                idle = Fraction(D * (F + I + W), self.v * self.q)
                return idle, idle

    def peak(self, rank: int) -> Fraction:
        """The most activations that a rank stores, in microbatches of a whole rank."""
        after = self.P - rank - 1
        F, M = Fraction, Fraction(self.M)
        bound = {
            **{"gpipe": M, "bfs": M, "inference": F(0), "1f1b": F(after + 1), "eager-1f1b": F(2 * after + 1)},
            **{"zb-h1": F(self.P), "zb-h2": F(2 * self.P - 1), "interleaved-zb": F(self.P)},
            **{"seq-1f1b": F(after, self.q) + 1},
            "interleaved-1f1b": F(2 * after + (self.v - 1) * self.P + 1, self.v),
        }[self.name]
        return min(bound, M)

    def compiled(self) -> qs.Plan:
        return qs.compile(self.name, mesh=qs.Mesh(pp=self.P), microbatches=self.M, chunks=self.v, slices=self.q)

    def simulate(self) -> qs.Simulation:
        return self.compiled().simulate(qs.Costs(forward=self.F, backward_input=self.I, backward_weight=self.W))


def assert_closed_forms(case: Case) -> None:
    simulation = case.simulate()
    makespan, span = case.idle()
    assert simulation.makespan == float(case.ideal + makespan), case
    assert simulation.span == float(case.ideal + span), case
    assert simulation.busy == (float(case.ideal),) * case.P, case
    assert simulation.peak_activations == tuple(float(case.peak(rank)) for rank in range(case.P)), case


def case_of_row(row: dict[str, Any]) -> Case:
    """Return the case of a row of the table; its "chunks" are the slices of Seq1F1B."""
    name, parts = NAMES[row["schedule"].split()[0]], row["chunks"]
    if name == "interleaved-zb" and parts == 1:
        name = "zb-h1"
    slices = parts if name == "seq-1f1b" else 1
    return Case(name, row["pp"], parts // slices, slices, row["microbatches"])


@pytest.mark.parametrize("row", UNIT_COST, ids=lambda row: f"{row['schedule']}-{row['pp']}-{row['microbatches']}")
def test_unit_cost_table(row):
    paired, sizes = PAIRED.get(row["schedule"]), {"mesh": qs.Mesh(pp=row["pp"]), "microbatches": row["microbatches"]}
    simulation = (qs.compile(paired, **sizes) if paired else case_of_row(row).compiled()).simulate()
    assert simulation.makespan == row["makespan"]
    assert simulation.span == row["span"]
    assert simulation.busy == (row["ideal"],) * row["pp"]
    assert simulation.bubble == 1 - row["ideal"] / row["makespan"]
    assert simulation.span_bubble == 1 - row["ideal"] / row["span"]
    assert list(simulation.peak_activations) == row["peaks"]
    assert max(simulation.peak_activations) == row["peak_activations"]


@pytest.mark.parametrize("column", ["1F1B", "ZB-H1", "ZB-H2"])
@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row['model']}-{row['p']}-{row['m']}")
def test_published_bubbles_under_measured_costs(row, column):
    plan = qs.compile(NAMES[column], mesh=qs.Mesh(pp=row["p"]), microbatches=row["m"])
    times = {"forward": row["T_F"], "backward_input": row["T_B"], "backward_weight": row["T_W"], "p2p": row["T_comm"]}
    assert round(plan.simulate(qs.Costs(**times)).span_bubble, 4) == row["bubble"][column]


def test_the_closed_forms_know_every_schedule():
    ours = {found.name for found in qs.all_schedules() if found.order.__module__.startswith("quintsched.")}
    assert ours - ELSEWHERE == set(FORMS)


def shapes(name: str, pp: int, numbers: Sequence[int]) -> Iterator[Case]:
    """Every shape with these many ranks and numbers of microbatches, and one more slice than most schedules take."""
    for chunks, slices, microbatches in product(CHUNKS, SLICES, numbers):
        if slices <= 2 or name == "seq-1f1b":
            yield Case(name, pp, chunks, slices, microbatches)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("numbers", [FEW, pytest.param(MICROBATCHES, marks=pytest.mark.slow)], ids=["few", "all"])
@pytest.mark.parametrize("pp", PP)
@pytest.mark.parametrize("name", FORMS)
def test_sound_and_equal_to_the_closed_forms_in_every_shape(name, pp, numbers):
    for case in shapes(name, pp, numbers):
        if case.taken:
            assert_closed_forms(case)
        else:
            with pytest.raises(qs.UsageError):
                case.compiled()


@st.composite
def cases(draw: st.DrawFn, name: str) -> Case:
    pp, costs = draw(st.integers(1, 8)), [draw(st.integers(0, 50)) for _ in range(3)]
    chunks = draw(st.integers(2, 4)) if name in ("bfs", "interleaved-1f1b", "interleaved-zb", "inference") else 1
    slices = draw(st.integers(1, 5)) if name == "seq-1f1b" else 1
    rounds = name.startswith("interleaved")
    return Case(name, pp, chunks, slices, draw(st.integers(1, 3)) * pp if rounds else draw(st.integers(1, 24)), *costs)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=120)
@given(data=st.data())
def test_equal_to_the_closed_forms_at_random_costs(name, data):
    assert_closed_forms(data.draw(cases(name)))


@given(case=cases("eager-1f1b"), data=st.data())
def test_eager_1f1b_hides_messages(case, data):
    whole = case.F + case.I + case.W
    p2p = data.draw(st.integers(0, whole)) / 2
    costs = qs.Costs(forward=case.F, backward_input=case.I, backward_weight=case.W, p2p=p2p)
    assert case.compiled().simulate(costs).makespan == (case.M + case.P - 1) * whole + 2 * (case.P - 1) * p2p


TAKES, V_SHAPED = "this schedule takes", ("zbv", "v-half", "v-min", "dualpipe-v")
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("interleaved-1f1b", {"microbatches": 1}, "works: 4$"),
    ("interleaved-1f1b", {"microbatches": 31}, "works: 28 or 32$"),
    ("interleaved-zb", {"microbatches": 6}, "works: 4 or 8$"),
    *((name, {"chunks": 2}, f"{name}: chunks is 2; {TAKES}") for name in ("1f1b", "zb-h2")),
    *((name, {"chunks": 1}, f"{name}: chunks is 1; {TAKES}") for name in ("interleaved-1f1b", "bfs")),
    ("dualpipe", {"chunks": 3}, f"dualpipe: chunks is 3; {TAKES} exactly 1"),
    *((name, {"chunks": 3}, f"{name}: chunks is 3; {TAKES} exactly 2") for name in V_SHAPED),
    ("1f1b", {"slices": 2}, "1f1b: slices is 2; .*exactly 1"),
    ("seq-1f1b", {"slices": 0}, "seq-1f1b: slices is 0; .*1 to 4096"),
    ("seq-1f1b", {"slices": True}, "slices is True; .*whole"),
    ("dualpipe", {"mesh": "pp=1"}, "pp is 1, which is odd; the nearest that works: 2$"),
    ("dualpipe", {"microbatches": 7}, "microbatches is 7, below 2 x pp = 8; the nearest that works: 8$"),
    ("dualpipe", {"microbatches": 9}, "microbatches is 9, which is odd; the nearest that works: 8 or 10$"),
    ("hanayo", {"chunks": 3, "microbatches": 4}, "2 or 4"),
    ("hanayo", {"chunks": 2, "microbatches": 6}, "4 or 8"),
    ("chimera", {"mesh": "pp=3"}, "2 or 4"),
    ("chimera", {"microbatches": 6}, "4 or 8"),
    *(("afab", {"microbatches": number}, "microbatches") for number in (0, -1, 2**40, True, 2.5)),
    ("v-half", {"mesh": "pp=20000", "microbatches": 4}, "v-half: pp is 20000, .*; the most that works: 1024"),
]


@pytest.mark.parametrize(("name", "shape", "words"), REFUSED, ids=str)
def test_shapes_that_a_schedule_does_not_take(name, shape, words):
    with pytest.raises(qs.UsageError, match=words):
        qs.compile(name, **{"mesh": "pp=4", "microbatches": 8} | shape)


@pytest.mark.parametrize("name", ["zbv", "dualpipe-v", "zb-h1", "zb-h2", "1f1b", "bfs", "inference", "eager-1f1b"])
def test_few_microbatches_on_many_ranks_cost_what_they_compute(name: str) -> None:
    """20,000 ranks, of which some are asked: what one costs does not grow with how many there are."""
    schedule = find_schedule(name)
    shape = schedule.shape(20_000, 4, None)
    shape.stages_of(0)
    began = time.process_time()
    assert all(0 < sum(1 for _ in schedule.order(rank, shape)) <= 24 for rank in range(0, 20_000, 400))
    assert time.process_time() - began < 0.5
