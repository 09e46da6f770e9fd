"""Traces: what was recorded comes back, costs, makespans and hidden exchanges with it; broken ones are refused."""

import json

import numpy as np
import pytest

import quintsched as qs
from quintsched.ir.instruction_set import Fwd
from quintsched.simulation.cost_forms import Wires
from quintsched.trace.measured_trace import Trace
from tests.helpers.refusals import require_refusals
from tests.traces import rank_traces, write_trace

TIMES = {"forward": (10.0, 12.0), "backward_input": (11.0, 9.0), "backward_weight": (7.0, 9.0)}
PER_STAGE = qs.Costs(unit="ms", **TIMES, p2p=0.6, optimizer=(3.0, 4.0), clip=(1.0, 2.0))

PER_STAGE_4 = PER_STAGE.model_copy(
    update={name: getattr(PER_STAGE, name) * 2 for name in PER_STAGE.model_fields_set - {"unit", "p2p"}}
)

SHAPES = {"interleaved-1f1b": {"chunks": 2}, "seq-1f1b": {"slices": 2}}


def simulated(name="1f1b", mesh="pp=2", microbatches=4, costs=PER_STAGE, **shape):
    return qs.compile(name, mesh=mesh, microbatches=microbatches, **SHAPES.get(name, {}), **shape).simulate(costs)


@pytest.mark.parametrize("name", [schedule.name for schedule in qs.all_schedules()])
def test_a_simulation_under_the_costs_of_a_trace_takes_as_long_as_what_was_traced(tmp_path, name):
    costs = qs.Costs(unit="ms", forward=9.0, backward_input=8.0, backward_weight=7.0, p2p=0.5, optimizer=3.0, clip=1.0)
    simulation = simulated(name, microbatches=6, costs=costs)
    for gap in (0.0, 0.2):
        trace = write_trace(tmp_path, simulation, gap=gap)
        assert trace.makespan(2) * 1000 == pytest.approx(simulation.makespan, abs=gap + 0.01)
        assert simulation.plan.simulate(trace.costs()).makespan == pytest.approx(simulation.makespan, rel=0.002)


def test_costs_come_back_and_halves_of_a_full_backward_are_equal(tmp_path):
    found = write_trace(tmp_path / "dp", simulated("zb-h1", mesh="dp=2,pp=2")).costs()
    assert found.unit == "ms"
    for name in ("forward", "backward_input", "backward_weight", "p2p", "optimizer"):
        assert getattr(found, name) == pytest.approx(getattr(PER_STAGE, name), abs=0.001), name
    assert max(found.clip) == pytest.approx(2.0, abs=0.001)
    found = write_trace(tmp_path / "full", simulated("1f1b")).costs("s")
    assert found.unit == "s"
    assert found.forward == (0.01, 0.012), "no more digits than a trace has"
    assert found.backward_input == found.backward_weight == pytest.approx((0.009, 0.009), abs=1e-6)


def test_links_that_differ_come_back(tmp_path):
    """Of pairs whose messages were waited for; what is like the others is left out."""
    links = [{"source": 2, "destination": 3, "latency": 6.0}, {"source": 3, "destination": 2, "latency": 0.7}]
    costs = PER_STAGE_4.model_copy(update={"p2p": Wires(latency=0.7, links=links)})
    simulation = simulated("gpipe", mesh="dp=2,pp=4", microbatches=3, costs=costs)
    found = write_trace(tmp_path, simulation, scales=(1.0, 1.0, 1.0)).costs()
    assert isinstance(found.p2p, Wires)
    assert found.p2p.latency == pytest.approx(0.7, abs=0.002)
    given = {(link.source, link.destination): link.latency for link in found.p2p.links}
    assert given == pytest.approx({(2, 3): 6.0, (3, 2): 0.7}, abs=0.002)
    assert simulation.plan.simulate(found).makespan == pytest.approx(simulation.makespan, rel=0.002)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "seq-1f1b", "dualpipe"])
def test_factors_come_back(tmp_path, name):
    """Recover factors common to all computations, with mean 1; the rest is in the stages."""
    lengths, parts = (1.0, 0.5, 2.0, 1.5, 0.25, 0.75), (0.5, 1.5)
    slices = parts if name == "seq-1f1b" else None
    costs = qs.Costs(unit="ms", forward=90.0, backward_input=80.0, microbatches=lengths, slices=slices, p2p=0.0)
    simulation = simulated(name, microbatches=6, costs=costs)
    trace = write_trace(tmp_path, simulation)
    found = trace.costs(per_microbatch=True)
    of_forward = found.forward
    if name == "dualpipe":  # a stage that half of the microbatches visit knows their share only
        assert len(of_forward.microbatches) == 6
    else:
        assert of_forward.microbatches == pytest.approx(lengths, abs=0.005)
        assert found.backward_weight.microbatches == pytest.approx(lengths, abs=0.005)
        assert of_forward.slices == (slices and pytest.approx(slices, abs=0.005))
    error = simulation.plan.simulate(found).makespan / simulation.makespan - 1
    assert abs(error) < 0.003
    assert abs(simulation.plan.simulate(trace.costs()).makespan / simulation.makespan - 1) > 0.02


def test_a_wait_before_the_first_computation_is_no_part_of_the_step(tmp_path):
    """Of rank 0 by 5 s; and of rank 1, which waits for its first activation long before rank 0 computes."""
    simulation = simulated()
    for number, (rank, first, seconds) in enumerate(((0, 0, 5.0), (1, 1, 0.005))):
        ranks = list(rank_traces(simulation))
        ranks[rank].start[:, first] -= seconds
        ranks[rank].wait[:, first] += seconds
        for of_rank in ranks:
            of_rank.save_rank(tmp_path / str(number))
        trace = Trace.load(tmp_path / str(number), simulation.plan)
        assert trace.makespan(2) == pytest.approx(simulation.makespan / 1000, rel=0.001)
        assert trace.costs().forward == pytest.approx(PER_STAGE.forward, abs=0.01)
        span = trace.step().timeline[rank][first]
        assert isinstance(span.instruction, Fwd)
        assert span.end - span.start - span.wait == pytest.approx(PER_STAGE.forward[rank], abs=0.01)


def change(**values):
    return lambda file: file.update(values)


def change_step(**values):
    return lambda file: file["steps"][0].update(values)


BROKEN = [
    (change(format="x"), qs.InputError, '/format: .*"quintsched.trace"'),
    (change(version=2), qs.InputError, "/version: 2 is from the future"),
    (change(more=1), qs.InputError, "/more: unknown key"),
    (change(plan="0" * 64), qs.MisfitError, "the trace of another plan"),
    (change(rank=0), qs.InputError, "/rank: it is of rank 0, pp rank 1, not of rank 1, 1"),
    (change(steps=[]), qs.InputError, "/steps: "),
    (change_step(end=[1.0]), qs.InputError, r"/steps/0/end: it has 1 value; .* \d+ instructions"),
    (change_step(start=["1"]), qs.InputError, "/steps/0/start/0: "),
    (change_step(start=[1e308]), qs.InputError, "/steps/0/start/0: Input should be"),
    (change_step(step=9), qs.InputError, "rank 0 recorded the steps 2, rank 1 9"),
]


def test_broken_files(tmp_path):
    plan = write_trace(tmp_path, simulated()).plan
    text = (tmp_path / "rank1.json").read_text()
    for edit, error, words in BROKEN:
        file = json.loads(text)
        edit(file)
        (tmp_path / "rank1.json").write_text(json.dumps(file))
        with pytest.raises(error, match=words) as raised:
            Trace.load(tmp_path, plan)
        assert str(raised.value).startswith(str(tmp_path))
    for wait in (-1.0, 1e9):
        file = json.loads(text)
        file["steps"][0]["wait"][3] = wait
        (tmp_path / "rank1.json").write_text(json.dumps(file))
        with pytest.raises(qs.InputError, match=r"rank1\.json: /steps/0/wait/3: a wait is not within"):
            Trace.load(tmp_path, plan)


def test_truncated_and_missing_files(tmp_path):
    plan = write_trace(tmp_path, simulated(mesh="dp=2,pp=2")).plan
    text = (tmp_path / "rank2.json").read_text()
    (tmp_path / "rank2.json").write_text(text[: len(text) // 2])
    require_refusals((r"rank2\.json: .*is it truncated", lambda: Trace.load(tmp_path, plan)), error=qs.InputError)
    for rank in (2, 3):
        (tmp_path / f"rank{rank}.json").unlink()
    missing = r"rank2.json is missing \(and 1 more\); the plan has 4 ranks"
    require_refusals((missing, lambda: Trace.load(tmp_path, plan)), error=qs.InputError)
    require_refusals(("no such directory", lambda: Trace.load(tmp_path / "nowhere", plan)))


OVERLAPPED = [("dualpipe-v", 2, 8), ("dualpipe-v", 4, 10), ("dualpipe", 4, 10), ("interleaved-1f1b", 2, 8)]
COST_TIMES = {"unit": "ms", "forward": 9.0, "backward_input": 8.0, "backward_weight": 7.0, "p2p": 0.5, "optimizer": 3.0}


def simulated_pairs(
    name="dualpipe-v", pp=2, microbatches=8, *, overlap=True, recompute=0, lengths=None, **more
) -> qs.Simulation:
    sizes = {"mesh": f"pp={pp}", "microbatches": microbatches, "recompute": recompute}
    return qs.compile(name, **sizes, overlap=overlap).simulate(qs.Costs(**COST_TIMES, microbatches=lengths, **more))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "pp", "microbatches"), OVERLAPPED)
@pytest.mark.parametrize(
    "exchanges", [{}, {"exchange": 4.0}, {"exchange": 3.0, "exchange_backward": 6.0}, {"exchange": 30.0}], ids=str
)
@pytest.mark.parametrize("recompute", [0, 1])
def test_pairs_under_the_costs_of_a_trace_take_as_long_as_what_was_traced(
    tmp_path, name, pp, microbatches, exchanges, recompute
):
    """With exchanges that the other side hides, and with some that are longer than it."""
    simulation = simulated_pairs(name, pp, microbatches, recompute=recompute, **exchanges)
    found = write_trace(tmp_path, simulation).costs()
    again = simulation.plan.simulate(found)
    assert again.makespan == pytest.approx(simulation.makespan, rel=0.0005)
    assert again.busy == pytest.approx(simulation.busy, rel=0.0005)
    assert found.p2p == pytest.approx(0.5, abs=0.001), "only real waits count, not those for a message that is there"


def test_what_is_hidden_is_shared_equally_and_the_rest_computes(tmp_path):
    """Of 4 and 2 (for both chunks of a rank), 3 each; alone, a forward takes as long as ever."""
    found = write_trace(tmp_path, simulated_pairs(exchange=4.0, exchange_backward=2.0)).costs()
    assert found.exchange == pytest.approx((1.5,) * 4, abs=0.001)
    assert found.exchange_backward == pytest.approx((1.5,) * 4, abs=0.001)
    assert np.add(found.forward, found.exchange) == pytest.approx((13.0 / 2,) * 4, abs=0.001)
    backward = np.sum([found.backward_input, found.backward_weight, found.exchange_backward], axis=0)
    assert backward == pytest.approx((17.0 / 2,) * 4, abs=0.001)


def test_without_pairs_an_exchange_is_part_of_its_computation(tmp_path):
    found = write_trace(tmp_path, simulated_pairs(overlap=False, exchange=4.0)).costs()
    assert "exchange" not in found.model_fields_set
    assert found.forward == pytest.approx((13.0 / 2,) * 4, abs=0.001)
