"""Hidden exchanges, estimated from the overlapped pairs of a trace."""

import numpy as np
import pytest

import quintsched as qs
from tests.traces import write_trace

SHAPES = [("dualpipe-v", 2, 8), ("dualpipe-v", 4, 10), ("dualpipe", 4, 10), ("interleaved-1f1b", 2, 8)]
TIMES = {"unit": "ms", "forward": 9.0, "backward_input": 8.0, "backward_weight": 7.0, "p2p": 0.5, "optimizer": 3.0}


def simulated(
    name="dualpipe-v", pp=2, microbatches=8, *, overlap=True, recompute=0, lengths=None, **more
) -> qs.Simulation:
    sizes = {"mesh": f"pp={pp}", "microbatches": microbatches, "recompute": recompute}
    return qs.compile(name, **sizes, overlap=overlap).simulate(qs.Costs(**TIMES, microbatches=lengths, **more))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "pp", "microbatches"), SHAPES)
@pytest.mark.parametrize(
    "exchanges", [{}, {"exchange": 4.0}, {"exchange": 3.0, "exchange_backward": 6.0}, {"exchange": 30.0}], ids=str
)
@pytest.mark.parametrize("recompute", [0, 1])
def test_a_simulation_under_the_costs_of_a_trace_takes_as_long_as_what_was_traced(
    tmp_path, name, pp, microbatches, exchanges, recompute
):
    """With exchanges that the other side hides, and with some that are longer than it."""
    simulation = simulated(name, pp, microbatches, recompute=recompute, **exchanges)
    found = write_trace(tmp_path, simulation).costs()
    again = simulation.plan.simulate(found)
    assert again.makespan == pytest.approx(simulation.makespan, rel=0.0005)
    assert again.busy == pytest.approx(simulation.busy, rel=0.0005)
    assert found.p2p == pytest.approx(0.5, abs=0.001), "only real waits count, not those for a message that is there"


def test_what_is_hidden_is_shared_equally_and_the_rest_computes(tmp_path):
    """Of 4 and 2 (for both chunks of a rank), 3 each; alone, a forward takes as long as ever."""
    found = write_trace(tmp_path, simulated(exchange=4.0, exchange_backward=2.0)).costs()
    assert found.exchange == pytest.approx((1.5,) * 4, abs=0.001)
    assert found.exchange_backward == pytest.approx((1.5,) * 4, abs=0.001)
    assert np.add(found.forward, found.exchange) == pytest.approx((13.0 / 2,) * 4, abs=0.001)
    backward = np.sum([found.backward_input, found.backward_weight, found.exchange_backward], axis=0)
    assert backward == pytest.approx((17.0 / 2,) * 4, abs=0.001)


def test_without_pairs_an_exchange_is_part_of_its_computation(tmp_path):
    found = write_trace(tmp_path, simulated(overlap=False, exchange=4.0)).costs()
    assert "exchange" not in found.model_fields_set
    assert found.forward == pytest.approx((13.0 / 2,) * 4, abs=0.001)
