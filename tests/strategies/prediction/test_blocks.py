"""Layers of ranks, and launches of the host: a layer takes at least what they take, nothing where it has work."""

import pytest

import quintsched as qs
from quintsched.strategies.descriptions.model import Experts
from quintsched.strategies.prediction import operators
from quintsched.strategies.prediction.efficiency import LAUNCH_S, launches
from quintsched.strategies.prediction.layers_of_ranks import LayerLayout, kinds
from quintsched.strategies.prediction.strategy_columns import Table
from quintsched.strategies.prediction.vectorized_prediction import distinct_blocks, sizes_of

GPT = qs.find_model({"layers": 4, "hidden": 256, "heads": 4, "attention": "flash2", "dropout": False})
H100 = qs.find_hardware("h100")


def table(**given):
    return Table.from_strategies([qs.Strategy(**{"gpus": 1, "batch": 8, "seq": 512} | given)])


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


def test_kinds_are_runs_of_ranks_in_their_order():
    model = qs.Model(layers=6, hidden=512, heads=8, experts=Experts(count=4, top_k=1, ffn=512, every=2))
    found = kinds(model, [LayerLayout(6, 1, "1f1b", None, "none"), LayerLayout(3, 1, "1f1b", None, (1, 0, 1))])
    assert found.rank.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 0, 0]]
    assert found.ranks.tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0]]
