"""A table's rows do not depend on each other."""

import numpy as np
import pytest

from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.model import Experts, Model
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.prediction.layers_of_ranks import LayerLayout, kinds
from quintsched.strategies.prediction.strategy_columns import Table
from quintsched.strategies.prediction.vectorized_prediction import evaluate

MODEL = Model(layers=6, hidden=512, heads=8)
HARDWARE = Hardware(tflops={"bf16": 300.0}, memory_gb=80, memory_gbps=2000, link_gbps=16, network_gbps=1)


def strategy(**given: object) -> Strategy:
    return Strategy(gpus=6, batch=12, seq=512, pp=3, **given)


def test_kinds_are_runs_of_ranks_in_their_order():
    model = Model(layers=6, hidden=512, heads=8, experts=Experts(count=4, top_k=1, ffn=512, every=2))
    found = kinds(model, [LayerLayout(6, 1, "1f1b", None, "none"), LayerLayout(3, 1, "1f1b", None, (1, 0, 1))])
    assert found.rank.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 0, 0]]
    assert found.ranks.tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize("experts", [None, Experts(count=4, top_k=1, ffn=512, shared=1)])
def test_a_row_is_the_same_beside_others_and_alone(experts):
    model = MODEL.model_copy(update={"experts": experts})
    rows = [
        strategy(dp=2, schedule="zbv", zero=3, dtype="fp32"),
        strategy(tp=2, schedule="gpipe", recompute="selective", sequence_parallel=True),
        strategy(dp=2, schedule="v-half", chunks=2),
        strategy(cp=2, schedule="1f1b", chunks=1),
        strategy(dp=2, schedule="1f1b", chunks=1, recompute=(2, 1, 0), zero=1),
        strategy(tp=2, schedule="interleaved-1f1b", chunks=2, recompute="full"),
        strategy(tp=2, schedule="interleaved-1f1b", chunks=2, recompute="full", overlap=False),
    ]
    together = evaluate(model, HARDWARE, Table.from_strategies(rows), simulate=True)
    alone = [evaluate(model, HARDWARE, Table.from_strategies([row]), simulate=True) for row in rows]
    assert together.step_s.tolist() == [one.step_s[0] for one in alone]
    assert together.memory_bytes.tolist() == [one.memory_bytes[0] for one in alone]
    for terms in ("seconds", "bytes"):
        for name, values in getattr(together, terms).items():
            assert np.array_equal(values, [getattr(one, terms)[name][0] for one in alone]), name
