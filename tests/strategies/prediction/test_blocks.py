"""Launches of the host: a layer takes at least what they take, forward and backward, and nothing where it has work."""

import pytest

from quintsched.strategies.descriptions.presets_and_files import find_hardware, find_model
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.prediction import operators
from quintsched.strategies.prediction.efficiency import LAUNCH_S, launches
from quintsched.strategies.prediction.strategy_columns import Table
from quintsched.strategies.prediction.vectorized_prediction import distinct_blocks, sizes_of

GPT = find_model({"layers": 4, "hidden": 256, "heads": 4, "attention": "flash2", "dropout": False})
H100 = find_hardware("h100")


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
