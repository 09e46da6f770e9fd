"""Times of operators and collectives: they grow with what is asked; measured curves come before the fitted model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintsched.strategies.descriptions.hardware import Curve, Measured
from quintsched.strategies.descriptions.presets_and_files import find_hardware
from quintsched.strategies.prediction.efficiency import launch_s, operator_times
from quintsched.strategies.prediction.operators import Pass, Product
from quintsched.strategies.prediction.predicted_collectives import overlap

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


def test_what_is_measured_comes_first():
    curve = Curve(sizes=(1e6, 1e12), rates=(1e9, 1e11))
    measured = Measured(matmul={"fp32": curve}, memory=Curve(sizes=(1.0,), rates=(1e9,)), link=curve, kernel_s=1e-3)
    hardware = A100.model_copy(update={"measured": measured})
    assert launch_s(hardware) == 1e-3
    assert forward_s(product(10**4, 10**4, 5000), hardware, "fp32") == pytest.approx(10.0)
    assert forward_s(product(10**4, 10**4, 5000), hardware, "bf16") < 1.0
    assert forward_s(Pass("pass", array(1e9), array(0)), hardware) == pytest.approx(1.0)


@given(st.floats(0, 10), st.floats(0, 10))
def test_what_is_exposed_and_what_is_hidden_are_the_whole(seconds, beside):
    exposed, hidden = overlap(array(seconds), array(beside), A100)
    assert exposed.item() + hidden.item() == pytest.approx(seconds)
    assert exposed.item() >= max(0.0, seconds - beside) - 1e-12
