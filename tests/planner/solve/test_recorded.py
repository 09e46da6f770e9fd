"""Recorded runs: planted causes are named with their share, plans are rebuilt, and replays take as long as the runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import quintsched as qs
from quintsched.errors import InputError, UnsoundError
from quintsched.ir.instruction_set import Bwd, BwdInput, BwdWeight, Compute, Fwd
from quintsched.recorded_runs.recorded_run import ComputedSpan, recorded_run
from quintsched.simulation.cost_forms import Link, PerUnit, Wires
from quintsched.solve import certify
from quintsched.solve.recorded import RecordedStep, load_run, what_if
from quintsched.solve.recorded.idle_causes import CAUSES, IdleCauses, waits_of
from quintsched.solve.recorded.replay import RecordedProblem
from tests.helpers.refusals import require_refusals
from tests.traces import write_trace

DATA = Path(__file__).parents[2] / "data" / "primus"


@dataclass
class Planted:
    """Times of a made-up run: arrays of (stages, microbatches), pauses before computations, and wires."""

    plan: qs.Plan
    forward: np.ndarray
    backward: np.ndarray
    pauses: dict[Compute, float] = field(default_factory=dict)
    wires: dict[tuple[int, int], float] = field(default_factory=dict)

    @classmethod
    def even(cls, name: str, pp: int, microbatches: int, chunks: int = 1, recompute: int = 0) -> Planted:
        plan = qs.compile(name, mesh=f"pp={pp}", microbatches=microbatches, chunks=chunks, recompute=recompute)
        shape = (len(plan.stage_to_pp), microbatches)
        return cls(plan, np.full(shape, 10.0), np.full(shape, 20.0))

    def simulate(self) -> qs.Simulation:
        """Time it by the simulator, pauses included."""
        forward, backward = self.forward.copy(), self.backward.copy()
        for i, pause in self.pauses.items():
            (forward if isinstance(i, Fwd) else backward)[i.stage, i.microbatch] += pause
        links = tuple(Link(source=a, destination=b, latency=time) for (a, b), time in self.wires.items())
        halves = {name: per_unit(backward / 2) for name in ("backward_input", "backward_weight")}
        times = {"forward": per_unit(forward), "recompute": per_unit(self.forward), **halves}
        costs = qs.Costs(unit="ms", p2p=Wires(links=links), **times)
        return self.plan.simulate(costs)

    def step(self) -> RecordedStep:
        """Return what a trace of it would have."""
        computed = ([span for span in row if isinstance(span.instruction, Compute)] for row in self.simulate().timeline)
        rows = tuple(
            tuple(ComputedSpan(s.instruction, s.start + self.pauses.get(s.instruction, 0.0), s.end) for s in row)
            for row in computed
        )
        return RecordedStep(1, rows)

    @property
    def time(self) -> float:
        """Time until its last computation ends."""
        return self.step().makespan


def per_unit(times: np.ndarray) -> PerUnit:
    means = times.mean(axis=1, keepdims=True)
    return PerUnit(stages=tuple(means[:, 0]), cells=tuple(map(tuple, times / means)))


Plant = Callable[[Planted], None]


def slower(axis: int, number: int, factor: float) -> Plant:
    """Make one stage (axis 0) or microbatch (1) slower, and all others faster for it."""

    def plant(run: Planted) -> None:
        factors = np.ones(run.forward.shape[axis])
        factors[number] = factor
        for times in (run.forward, run.backward):
            times *= np.expand_dims(factors / factors.mean(), 1 - axis)

    return plant


def stage(number: int, factor: float) -> Plant:
    return slower(0, number, factor)


def microbatch(number: int, factor: float) -> Plant:
    return slower(1, number, factor)


def outlier(kind: str, of_stage: int, unit: int, factor: float) -> Plant:
    def plant(run: Planted) -> None:
        (run.forward if kind == "forward" else run.backward)[of_stage, unit] *= factor

    return plant


def wire(source: int, target: int, time: float) -> Plant:
    return lambda run: run.wires.update(
        {(target, source): run.wires.get((target, source), 0.0), (source, target): time}
    )


def wires(time: float) -> Plant:
    def plant(run: Planted) -> None:
        for a in range(run.plan.mesh.pp - 1):
            run.wires |= {(a, a + 1): time, (a + 1, a): time}

    return plant


def pause(rank: int, time: float, every: int = 1) -> Plant:
    def plant(run: Planted) -> None:
        computed = [i for i in run.plan.programs[rank] if isinstance(i, Fwd | Bwd)]
        run.pauses |= dict.fromkeys(computed[1::every], time)

    return plant


def one_pause(i: Compute, time: float) -> Plant:
    return lambda run: run.pauses.update({i: time})


FLAT, LOOP = ("1f1b", 4, 8), ("interleaved-1f1b", 4, 8, 2)
AGAIN, TWO_WAY = ("1f1b", 4, 8, 1, 1), ("chimera", 4, 8)
CASES: list[tuple[tuple, dict[str, tuple[Plant, str]]]] = [
    (FLAT, {"stages": (stage(0, 1.5), "stage 0 on rank 0")}),
    (FLAT, {"stages": (stage(2, 1.5), "stage 2 on rank 2")}),
    (FLAT, {"stages": (stage(3, 2.0), "stage 3 on rank 3")}),
    (LOOP, {"stages": (stage(7, 2.0), "stage 7 on rank 3")}),
    (("gpipe", 4, 6), {"stages": (stage(1, 1.4), "stage 1 on rank 1")}),
    (FLAT, {"messages": (wires(4.0), "from rank")}),
    (FLAT, {"messages": (wire(1, 2, 9.0), "from rank 1 to rank 2")}),
    (FLAT, {"messages": (wire(3, 2, 9.0), "from rank 3 to rank 2")}),
    (("1f1b", 8, 16), {"messages": (wire(6, 7, 12.0), "from rank 6 to rank 7")}),
    (FLAT, {"pauses": (pause(0, 4.0), "rank 0")}),
    (FLAT, {"pauses": (pause(3, 4.0), "rank 3")}),
    (FLAT, {"pauses": (one_pause(Bwd(2, 5), 90.0), "rank 2")}),
    (("gpipe", 4, 6), {"pauses": (pause(1, 6.0, every=3), "rank 1")}),
    (("gpipe", 5, 10), {"pauses": (pause(3, 2.5), "rank 3"), "messages": (wire(0, 1, 15.0), "from rank 0 to rank 1")}),
    (FLAT, {"variation": (outlier("forward", 1, 4, 8.0), "forward 4 of stage 1, 8 times")}),
    (FLAT, {"variation": (outlier("backward", 3, 6, 5.0), "backward 6 of stage 3, 5 times")}),
    (LOOP, {"variation": (outlier("backward", 5, 0, 4.0), "backward 0 of stage 5, 4 times")}),
    (FLAT, {"microbatches": (microbatch(3, 3.0), "microbatch 3")}),
    (("1f1b", 8, 16), {"microbatches": (microbatch(15, 4.0), "microbatch 15")}),
    (FLAT, {"stages": (stage(3, 1.6), "stage 3"), "messages": (wires(3.0), "from rank")}),
    (FLAT, {"pauses": (pause(2, 3.0), "rank 2"), "variation": (outlier("forward", 2, 2, 6.0), "forward 2 of stage 2")}),
    (AGAIN, {"stages": (stage(2, 1.5), "stage 2 on rank 2")}),
    (AGAIN, {"messages": (wire(2, 1, 12.0), "from rank 2 to rank 1")}),
    (AGAIN, {"pauses": (pause(3, 4.0), "rank 3")}),
    (AGAIN, {"variation": (outlier("backward", 1, 4, 5.0), "backward 4 of stage 1, 3.7 times")}),
    (TWO_WAY, {"stages": (stage(6, 1.5), "stage 6 on rank 1")}),
    (TWO_WAY, {"messages": (wire(2, 3, 14.0), "from rank 2 to rank 3")}),
    (TWO_WAY, {"microbatches": (microbatch(6, 3.0), "microbatch 6")}),
    (TWO_WAY, {"pauses": (pause(2, 3.0), "rank 2")}),
]


@pytest.mark.parametrize(("plan", "planted"), CASES)
def test_planted_causes_are_named_with_their_share(plan: tuple, planted: dict[str, tuple[Plant, str]]) -> None:
    def time(names: set[str]) -> float:
        run = Planted.even(*plan)
        for name in names:
            planted[name][0](run)
        return run.time

    run = Planted.even(*plan)
    for plant, _ in planted.values():
        plant(run)
    recording = RecordedProblem.from_step(run.plan, run.step())
    assert recording.replay(recording.parts).makespan == pytest.approx(run.time)
    found = IdleCauses(recording)
    shares = {cause.name: cause.time / run.time for cause in found.causes}
    assert sum(shares.values()) + found.work / run.time == pytest.approx(1)
    named = [cause for cause in found.causes if cause.name in CAUSES][: len(planted)]
    assert {cause.name for cause in named} == planted.keys()
    for cause in named:
        others = planted.keys() - {cause.name}
        alone = time({cause.name}) - time(set())
        expected = (alone + run.time - time(others)) / 2
        assert shares[cause.name] == pytest.approx(expected / run.time, abs=0.02)
        assert cause.where.startswith(planted[cause.name][1])
    assert shares["warm-up"] == pytest.approx((time(set()) - found.work) / run.time, abs=0.02)


def test_waits_are_blamed_on_ranks_messages_and_pauses_and_add_up() -> None:
    """Rank 0 waits for F0's message (5), F0 (10), a pause (3) and B0 (20) of rank 1; rank 1 for F0 and its message."""
    run = Planted.even("1f1b", 2, 1)
    wire(0, 1, 5.0)(run)
    one_pause(Bwd(1, 0), 3.0)(run)
    first, second = waits_of(RecordedProblem.from_step(run.plan, run.step()))
    assert first == pytest.approx({"rank 1": 30.0, "message 0 to 1": 5.0, "pause": 3.0})
    assert second == pytest.approx({"end": 20.0, "rank 0": 10.0, "message 0 to 1": 5.0, "pause": 3.0})
    run = Planted.even("interleaved-1f1b", 4, 8, 2)
    stage(5, 2.0)(run)
    recording = RecordedProblem.from_step(run.plan, run.step())
    for rank, waited in enumerate(waits_of(recording)):
        busy = sum(recording.ends[n] - recording.starts[n] for n in recording.orders[rank])
        assert sum(waited.values()) + busy == pytest.approx(run.time)


def test_a_better_order_is_certified_and_never_worse_than_the_recorded_one() -> None:
    run = Planted.even("gpipe", 3, 6)
    stage(1, 1.3)(run)
    wires(0.5)(run)
    found = what_if(recorded_run("test", run.plan, [run.step()]), memory_cap=3, effort=1, seconds=3)
    assert set(found.better) == {"whole", "split"}
    for best in found.better.values():
        certify(best.plan, best.certificate)
        assert best.certificate.value < run.time
        assert max(best.plan.simulate(best.certificate.costs).peak_activations) <= 3
    assert not any(isinstance(i, BwdInput | BwdWeight) for row in found.better["whole"].plan.programs for i in row)
    same = what_if(recorded_run("test", run.plan, [run.step()]), effort=1, seconds=2)
    assert same.memory_cap == (6.0, 6.0, 6.0)
    assert all(best.certificate.value <= run.time * (1 + 1e-9) for best in same.better.values())


MADE: list[tuple[str, dict[str, object], dict[str, float], tuple[str, str]]] = [
    ("1f1b", {"mesh": "pp=3", "microbatches": 6, "recompute": (1, 1, 0)}, {"p2p": 0.5}, ("warm-up", "until")),
    ("zb-h1", {"mesh": "pp=3", "microbatches": 6, "recompute": 1}, {"recompute": 3.0}, ("warm-up", "until")),
    ("chimera", {"mesh": "pp=2", "microbatches": 4, "recompute": (1, 0, 1, 0)}, {}, ("stages", "stage 2")),
    ("gpipe", {"mesh": "pp=3", "microbatches": 6, "offload": 3.0}, {"host_bandwidth": 0.03}, ("copies", "rank 2")),
    ("1f1b", {"mesh": "pp=4", "microbatches": 4, "lend": 3}, {"p2p": 0.5, "activation_message": 50}, ("warm-up", "")),
    ("chimera", {"mesh": "pp=2", "microbatches": 8, "offload": 1.5}, {"host_bandwidth": 0.06}, ("copies", "rank")),
]


@pytest.mark.parametrize(("name", "settings", "costs", "cause"), MADE)
def test_plans_that_recompute_offload_lend_or_go_both_ways_are_replayed_and_searched(
    tmp_path: Path, name: str, settings: dict, costs: dict, cause: tuple[str, str]
) -> None:
    plan = qs.compile(name, **settings)
    forward = tuple(10.0 + stage for stage in range(len(plan.stage_to_pp)))
    times = {"unit": "ms", "forward": forward, "backward_input": 8.0, "backward_weight": 6.0, **costs}
    simulated = plan.simulate(qs.Costs.model_validate(times))
    write_trace(tmp_path, simulated)
    plan.save(tmp_path / "plan.json")
    found = what_if(load_run(tmp_path), effort=1, seconds=0.3)
    assert found.step.makespan == pytest.approx(simulated.makespan, rel=1e-4)
    assert found.replayed["all"] == pytest.approx(simulated.makespan, rel=1e-4)
    assert found.causes[0].name == cause[0]
    assert found.causes[0].where.startswith(cause[1])
    assert sum(one.time for one in found.causes) + found.work == pytest.approx(found.replayed["all"])
    for best in found.better.values():
        certify(best.plan, best.certificate)
        claim = best.certificate
        assert (best.plan.recompute, len(best.plan.routes)) == (plan.recompute, len(plan.routes))
        assert found.run.plan.simulate(claim.costs).makespan == pytest.approx(simulated.makespan, rel=1e-4)
        assert claim.value <= simulated.makespan * (1 + 1e-4)
        held = zip(best.plan.simulate(claim.costs).peak_activations, found.memory_cap, strict=True)
        assert all(peak <= cap + 1e-9 for peak, cap in held)


def test_other_stages_may_recompute_where_that_is_asked() -> None:
    """With room for one microbatch on each rank, the order is faster where the first stages recompute."""
    run = Planted.even("1f1b", 3, 6)
    recorded = recorded_run("test", run.plan, [run.step()])
    same, others = (
        what_if(recorded, memory_cap=1.3, recompute=recompute, effort=1, seconds=600).better["whole"]
        for recompute in ("same", "auto")
    )
    assert same.plan.recompute == ()
    assert any(others.plan.recompute)
    assert others.certificate.value < same.certificate.value
    certify(others.plan, others.certificate)


def test_primus_is_replayed_within_a_hundredth_without_messages_and_closer_with_them() -> None:
    run = load_run(DATA)
    assert (run.source, run.plan.mesh.pp, run.plan.schedule.microbatches) == ("Primus", 8, 16)
    one_f_one_b = qs.compile("1f1b", mesh="pp=8", microbatches=16)
    assert run.plan.programs == one_f_one_b.programs
    for step in run.steps:
        recording = RecordedProblem.from_step(run.plan, step)
        assert recording.without_messages == pytest.approx(step.makespan, rel=0.012)
        assert recording.with_one_message_time == pytest.approx(step.makespan, rel=0.003)
        assert recording.replay(recording.parts).makespan == pytest.approx(step.makespan, rel=0.001)
    found = what_if(run, effort=1, seconds=1)
    assert found.better["whole"].certificate.bound > 0.98 * found.step.makespan
    assert found.avoidable("split") > 0.04


def test_wrong_requests_and_plans_that_are_not_searched_are_refused(tmp_path: Path) -> None:
    run = Planted.even("1f1b", 2, 2)
    recorded = recorded_run("test", run.plan, [run.step()])
    require_refusals(
        ("step 7 was not recorded", lambda: what_if(recorded, step=7)),
        ("give positive numbers", lambda: what_if(recorded, seconds=0.0)),
        ("recompute is 'all'; give same or auto", lambda: what_if(recorded, recompute="all")),
    )
    for name, settings, why in (
        ("dualpipe", {"microbatches": 4, "overlap": True}, "with Overlap"),
        ("seq-1f1b", {"microbatches": 2, "slices": 2}, "only training plans with whole sequences"),
    ):
        plan = qs.compile(name, mesh="pp=2", **settings)  # type: ignore[arg-type]
        write_trace(tmp_path / name, plan.simulate())
        plan.save(tmp_path / name / "plan.json")
        with pytest.raises(UnsoundError, match=why):
            what_if(load_run(tmp_path / name))


@pytest.mark.parametrize("late", [-20.0, 1.0, 200.0])
def test_clocks_that_differ_are_refused(late: float) -> None:
    run = Planted.even("1f1b", 4, 8)
    first, second, *others = run.step().rows
    shifted = tuple(ComputedSpan(one.instruction, one.start + late, one.end + late) for one in second)
    step = RecordedStep(1, (first, shifted, *others))
    is_refused = pytest.raises(InputError, match=r"before its input is made.*their clocks differ")
    with nullcontext() if late == 1.0 else is_refused:
        RecordedProblem.from_step(run.plan, step)
