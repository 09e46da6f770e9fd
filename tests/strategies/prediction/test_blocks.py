"""Launches of the host: a layer takes at least what they take, forward and backward, and nothing where it has work."""

import numpy as np
import pytest

from quintsched.strategies.descriptions.hardware import Measured
from quintsched.strategies.descriptions.presets_and_files import find_hardware, find_model
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.prediction import operators
from quintsched.strategies.prediction.efficiency import LAUNCH_S, launches
from quintsched.strategies.prediction.strategy_columns import Table
from quintsched.strategies.prediction.vectorized_prediction import distinct_blocks, evaluate, sizes_of

GPT = find_model({"layers": 4, "hidden": 256, "heads": 4, "attention": "flash2", "dropout": False})
H100 = find_hardware("h100")
GRAPHS = H100.model_copy(update={"measured": Measured(kernel_s=0.0)})


def table(**given):
    return Table.from_strategies([Strategy(**{"gpus": 1, "batch": 8, "seq": 512} | given)])


def layer(model=GPT, hardware=H100, **given):
    return distinct_blocks(model, hardware, table(**given)).dense


def test_a_gpt_layer_is_twenty_four_launches():
    counted = [launches(one) for one in operators.block(GPT, sizes_of(table(), "bf16"), GPT.kinds[0])]
    assert sum(one.forward.item() for one in counted) == 10
    assert sum(one.backward.item() for one in counted) == 14
    assert pytest.approx(0.183 / (4 * 24), rel=0.01) == 24 * LAUNCH_S


@pytest.mark.parametrize("seq", [32, 64, 128])
def test_a_small_layer_takes_as_long_as_its_launches(seq):
    found = layer(seq=seq)
    assert found.forward.item() == pytest.approx(10 * LAUNCH_S)
    assert (found.backward_input + found.backward_weight).item() == pytest.approx(14 * LAUNCH_S)


def test_launches_of_a_large_layer_cost_nothing():
    large = find_model("gpt3-175b")
    for name in ("forward", "backward_input", "backward_weight", "selective"):
        assert getattr(layer(large, seq=2048), name) == getattr(layer(large, GRAPHS, seq=2048), name)


def test_the_host_launches_during_communication_too():
    alone, shared = layer(hardware=H100), layer(hardware=H100.model_copy(update={"link_gbps": 10.0}), gpus=2, tp=2)
    assert (shared.forward + shared.tp_forward + shared.cp_forward + shared.ep).item() == pytest.approx(
        alone.forward.item()
    )


def test_recomputed_forwards_are_launched_again():
    def again_s(model, recompute):
        return float(evaluate(model, H100, table(recompute=recompute)).seconds["recompute"][0])

    unfused = GPT.model_copy(update={"attention": "unfused"})
    assert again_s(GPT, "full") == pytest.approx(8 * 4 * 10 * LAUNCH_S)
    assert again_s(unfused, "selective") == pytest.approx(8 * 4 * 3 * LAUNCH_S)


def test_a_calibrated_launch_comes_first_and_graphs_have_none():
    slow = H100.model_copy(update={"measured": Measured(kernel_s=1e-3)})
    assert layer(hardware=slow).forward.item() == pytest.approx(10e-3)
    assert layer(hardware=GRAPHS).forward.item() < LAUNCH_S
    assert np.all(layer(hardware=GRAPHS).forward > 0)
