"""Times of operators and collectives: they grow with what is asked; measured curves come before the fitted model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintsched.strategies.descriptions.hardware import Curve, Measured
from quintsched.strategies.descriptions.presets_and_files import find_hardware
from quintsched.strategies.prediction.efficiency import full_waves, launch_s, operator_times
from quintsched.strategies.prediction.operators import AttentionKernel, Pass, Product
from quintsched.strategies.prediction.predicted_collectives import (
    all_reduce_s,
    exchange_s,
    message_s,
    overlap,
    ring_s,
)

A100 = find_hardware("a100-80gb")


def array(value):
    return np.array([float(value)])


def product(m, n, k, batch=1):
    return Product("product", array(m), array(n), array(k), array(2), array(batch))


def forward_s(operator, hardware=A100, dtype="bf16"):
    return operator_times(operator, hardware, dtype).forward.item()


@given(st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 8))
def test_no_product_beats_the_peak_and_more_of_it_is_not_faster(m, n, k, batch):
    time = forward_s(product(m, n, k, batch))
    assert time >= 2 * batch * m * n * k / 312e12
    assert forward_s(product(m, n, 2 * k, batch)) >= time
    assert forward_s(product(m, n, k, 2 * batch)) >= time * (1 - 1e-12)


def test_a_large_product_reaches_the_fitted_share():
    rate = 2 * 65536**2 * 16384 / forward_s(product(65536, 65536, 16384))
    assert 0.95 * A100.constants.product < rate / 312e12 <= A100.constants.product


def test_the_last_wave_of_tiles_costs_as_much_as_a_full_one():
    full, one_more = full_waves(array(128 * 108), array(256), 1, 108), full_waves(array(128 * 109), array(256), 1, 108)
    assert full.item() == 1.0
    assert one_more.item() < 0.99


def test_halves_of_a_backward():
    times = operator_times(product(4096, 4096, 4096), A100, "bf16")
    assert times.backward_input.item() == times.backward_weight.item() == times.forward.item()
    scores = Product("scores", array(128), array(128), array(64), array(2), array(32), weighted=False)
    times = operator_times(scores, A100, "bf16")
    assert times.backward_weight.item() == 0 < times.backward_input.item()


def test_fused_attention_is_faster_in_its_second_version_and_for_longer_sequences():
    def rate(kernel, keys, hardware=A100):
        ones = array(1)
        return 1e12 / forward_s(AttentionKernel("a", array(1e12), 128, array(keys), kernel, ones, ones, ones), hardware)

    assert rate("flash", 1024) < rate("flash", 8192) < rate("flash2", 8192) < 312e12
    assert rate("flash2", 8192) < rate("flash2", 8192, find_hardware("h100")) < 2 * rate("flash2", 8192)


def test_what_is_measured_comes_first():
    curve = Curve(sizes=(1e6, 1e12), rates=(1e9, 1e11))
    measured = Measured(matmul={"fp32": curve}, memory=Curve(sizes=(1.0,), rates=(1e9,)), link=curve, kernel_s=1e-3)
    hardware = A100.model_copy(update={"measured": measured})
    assert launch_s(hardware) == 1e-3
    assert forward_s(product(10**4, 10**4, 5000), hardware, "fp32") == pytest.approx(10.0)
    assert forward_s(product(10**4, 10**4, 5000), hardware, "bf16") < 1.0
    assert forward_s(Pass("pass", array(1e9), array(0)), hardware) == pytest.approx(1.0)


def test_a_ring_is_a_fused_call_for_each_step_and_adding_up_between_them():
    """On a CPU: calls that have fewer operations run at the rate of those."""
    curve = Curve(sizes=(1e6, 1e9), rates=(1e9, 4e9))
    of_step, ring, bytes_of_queries = 1e6, 4, 4 * 8 * 128 * 64
    attention = AttentionKernel(
        "attention", array(ring * of_step), 64, array(64), "flash2", array(8), array(128), array(ring)
    )
    measured = Measured(
        attention={"fp32": curve},
        attention_backward={"fp32": curve},
        memory=Curve(sizes=(1.0, 2.0), rates=(1e9, 1e9)),
        kernel_s=1e-6,
        cores=2,
    )
    times = operator_times(attention, A100.model_copy(update={"measured": measured}), "fp32")
    steps = [
        of_step / 1e9 + passes * bytes_of_queries / 1e9 + kernels * 1e-6 for passes, kernels in ((5, 10), (15, 20))
    ]
    assert times.forward.item() == pytest.approx(ring * steps[0])
    assert times.backward.item() == pytest.approx(ring * steps[1])


def test_a_ring_inside_a_node_is_faster_than_across_nodes():
    inside, across = (ring_s(array(1e9), array(n), array(1), A100).item() for n in (8, 16))
    alone = ring_s(array(1e9), array(1), array(1), A100).item()
    assert alone == 0 < inside < across
    spread = ring_s(array(1e9), array(16), array(8), A100).item()
    assert spread > 4 * across  # one member in each node, which has one of its eight ports
    assert all_reduce_s(array(1e9), array(8), array(1), A100).item() == pytest.approx(2 * inside)


def test_exchanges_and_messages_grow_with_distance():
    near, far = (exchange_s(array(1e8), 1.0, None, array(8), array(stride), A100).item() for stride in (1, 8))
    assert near < far
    assert message_s(array(1e8), array(1), A100).item() < message_s(array(1e8), array(8), A100).item()


@given(st.floats(0, 10), st.floats(0, 10))
def test_what_is_exposed_and_what_is_hidden_are_the_whole(seconds, beside):
    exposed, hidden = overlap(array(seconds), array(beside), A100)
    assert exposed.item() + hidden.item() == pytest.approx(seconds)
    assert exposed.item() >= max(0.0, seconds - beside) - 1e-12
