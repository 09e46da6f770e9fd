"""Operators of blocks, against parameter counts and formulas of papers."""

import numpy as np
import pytest

from quintsched.strategies.descriptions import parameters
from quintsched.strategies.descriptions.presets_and_files import find_model
from quintsched.strategies.prediction.operators import BlockSizes, Product, block, head
from quintsched.strategies.prediction.predict_one_strategy import model_flops


def sizes(tp=1, ep=1, seq=1024, cp=1, spread=0):
    numbers = {"tp": tp, "cp": cp, "ep": ep, "sequence_parallel": spread, "microbatch": 1, "seq": seq, "width": 2}
    return BlockSizes(**{name: np.array([float(value)]) for name, value in numbers.items()})


def weights(operators):
    return sum(
        float((one.n * one.k * one.batch).item()) for one in operators if isinstance(one, Product) and one.weighted
    )


MODELS = ["gpt3-175b", "llama-2-70b", "mixtral-8x7b", "qwen3-8b", "qwen3-next-80b-a3b", "deepseek-v3", "mpt-125m"]


@pytest.mark.parametrize("name", MODELS)
def test_products_have_the_weights_of_the_model(name):
    model = find_model(name)
    found = sum(weights(block(model, sizes(), model.kinds[place])) for place in model.layer_kinds)
    found += weights(head(model, sizes())) * (1 if model.tied else 2)
    counted = parameters.count(model)
    assert found == sum(number for kind, number in counted.items() if kind not in ("positions", "norms", "biases"))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallelism_shares_out_the_weights(name, tp):
    model = find_model(name)
    whole, part = (weights(block(model, sizes(tp), model.kinds[0])) for tp in (1, tp))
    assert whole / tp <= part < whole / tp * 1.35  # what is compressed for latent attention is on every rank


def test_a_delta_net_needs_as_much_for_each_token_of_any_length():
    """Megatron-LM counts the recurrence, 8 · value_size² for each token and head; chunks need 37.5 % more."""
    model = find_model("qwen3-next-80b-a3b")

    def flops(seq):
        found = [one for one in block(model, sizes(seq=seq), model.kinds[0]) if isinstance(one, Product)]
        return sum(2 * (one.batch * one.m * one.n * one.k).item() for one in found if not one.weighted)

    assert flops(1024) == pytest.approx(1.375 * 1024 * 32 * 8 * 128**2)
    assert flops(4096) == 4 * flops(1024)


@pytest.mark.parametrize("name", ["gpt3-175b", "mt-nlg-530b", "mpt-7b"])
def test_operations_are_those_of_the_paper(name):
    model, s = find_model(name), 2048
    h, layers = model.hidden, model.layers
    paper = 72 * s * layers * h**2 * (1 + s / (6 * h) + model.vocab / (12 * layers * h))
    assert model_flops(model, s) == pytest.approx(paper, rel=1e-12)
