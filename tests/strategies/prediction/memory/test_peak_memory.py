"""Memory of ranks, term by term: parts add up, are where they belong, and follow the formulas of ZeRO."""

from typing import Any

import numpy as np
import pytest

from quintsched.strategies.descriptions.parameters import Held, total
from quintsched.strategies.descriptions.presets_and_files import find_hardware, find_model, model_names
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.prediction.memory.activations import ActivationSizes, block_kept
from quintsched.strategies.prediction.memory.weights_grads_optimizer_bytes import state_bytes
from quintsched.strategies.prediction.strategy_columns import Table
from quintsched.strategies.prediction.vectorized_prediction import held

GPT3, A100 = find_model("gpt3-175b"), find_hardware("a100-80gb")


def terms_of(model: Any = GPT3, **asked: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return each term for every pipeline rank."""
    strategy = Strategy(**{"gpus": 1, "batch": 64, "seq": 2048, **asked})
    terms, _ = held(model, A100, Table.from_strategies([strategy]), each_rank=True)
    return {name: bytes_[0] for name, bytes_ in terms.items()}


@pytest.mark.parametrize("name", model_names())
def test_one_rank_holds_all_weights(name: str) -> None:
    model = find_model(name)
    terms = terms_of(model, seq=model.seq)
    assert terms["weights"].tolist() == [2 * total(model)]
    assert terms["gradients"].tolist() == [4 * total(model)]
    assert terms["optimizer"].tolist() == [12 * total(model)]


@pytest.mark.parametrize("pp", [1, 2, 8, 12])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved-1f1b"])
def test_ranks_share_the_model_out_and_a_tied_head_is_a_copy(pp: int, schedule: str) -> None:
    chunks = 1 if schedule == "1f1b" else 2
    terms = terms_of(gpus=pp, pp=pp, schedule=schedule, chunks=chunks, batch=pp * 4)
    copies = GPT3.vocab * GPT3.hidden if pp * chunks > 1 else 0
    assert terms["weights"].sum() == 2 * (total(GPT3) + copies)


def test_activations_are_the_blocks_times_what_is_in_flight() -> None:
    terms = terms_of(gpus=32, pp=4, tp=8)
    kept = block_kept(GPT3, ActivationSizes(1, 2048, tp=8))
    for kind in ("attention", "scores", "ffn", "masks"):
        assert terms[f"activations_{kind}"].tolist() == [24 * flight * kept[kind] for flight in (4, 3, 2, 1)]
    assert terms["logits"].tolist() == [0, 0, 0, 2048 * 4 * 51200 / 8]
    assert terms["activations_embedding"].tolist() == [4 * 2048 * 12288, 0, 0, 0]


@pytest.mark.parametrize(("element", "parts"), [(2, (2, 4, 12)), (4, (4, 4, 8)), (8, (8, 8, 16))])
def test_formulas_of_zero(element: int, parts: tuple[int, int, int]) -> None:
    """Rajbhandari et al. 2020, arXiv:1910.02054, figure 1, with what is gathered; shards are rounded up."""
    weight, gradient, optimizer = parts
    held, unit, replicas = Held(1003, 0), Held(100, 0), 4
    found = state_bytes(held, unit, element, zero=np.arange(4), replicas=replicas, expert_replicas=replicas)
    shard = 251
    assert found["weights"].tolist() == [weight * n for n in (1003, 1003, 1003, shard)]
    assert found["gradients"].tolist() == [gradient * n for n in (1003, 1003, shard, shard)]
    assert found["optimizer"].tolist() == [optimizer * n for n in (1003, shard, shard, shard)]
    assert found["gathered"].tolist() == [0, 0, gradient * 100, gradient * 100 + weight * 200]
