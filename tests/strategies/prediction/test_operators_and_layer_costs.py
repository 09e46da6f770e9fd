"""Operators of blocks and costs of layers: formulas of papers, launches of the host, cuts as good as published ones."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quintsched as qs
from quintsched.solve import cut_stages
from quintsched.strategies.descriptions import parameters
from quintsched.strategies.descriptions.hardware import Curve, MeasuredRates
from quintsched.strategies.prediction import operators
from quintsched.strategies.prediction.layer_times import layer_costs
from quintsched.strategies.prediction.operator_device_times import LAUNCH_S, launch_s, launches, operator_times
from quintsched.strategies.prediction.operators import BlockSizes, MemoryOp, Product, block, head
from quintsched.strategies.prediction.predict_one_strategy import model_flops
from quintsched.strategies.prediction.predicted_collectives import overlap
from quintsched.strategies.prediction.simulated_strategy import costs_of
from quintsched.strategies.prediction.strategy_columns import Table
from quintsched.strategies.prediction.vectorized_prediction import distinct_blocks, sizes_of


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
    model = qs.find_model(name)
    found = sum(weights(block(model, sizes(), model.kinds[place])) for place in model.layer_kinds)
    found += weights(head(model, sizes())) * (1 if model.tied else 2)
    counted = parameters.count(model)
    assert found == sum(number for kind, number in counted.items() if kind not in ("positions", "norms", "biases"))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallelism_shares_out_the_weights(name, tp):
    model = qs.find_model(name)
    whole, part = (weights(block(model, sizes(tp), model.kinds[0])) for tp in (1, tp))
    assert whole / tp <= part < whole / tp * 1.35  # what is compressed for latent attention is on every rank


def test_a_delta_net_needs_as_much_for_each_token_of_any_length():
    """Megatron-LM counts the recurrence, 8 · value_size² for each token and head; chunks need 37.5 % more."""
    model = qs.find_model("qwen3-next-80b-a3b")

    def flops(seq):
        found = [one for one in block(model, sizes(seq=seq), model.kinds[0]) if isinstance(one, Product)]
        return sum(2 * (one.batch * one.m * one.n * one.k).item() for one in found if not one.weighted)

    assert flops(1024) == pytest.approx(1.375 * 1024 * 32 * 8 * 128**2)
    assert flops(4096) == 4 * flops(1024)


@pytest.mark.parametrize("name", ["gpt3-175b", "mt-nlg-530b", "mpt-7b"])
def test_operations_are_those_of_the_paper(name):
    model, s = qs.find_model(name), 2048
    h, layers = model.hidden, model.layers
    paper = 72 * s * layers * h**2 * (1 + s / (6 * h) + model.vocab / (12 * layers * h))
    assert model_flops(model, s) == pytest.approx(paper, rel=1e-12)


A100 = qs.find_hardware("a100-80gb")


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
    measured = MeasuredRates(
        matmul={"fp32": curve}, memory=Curve(sizes=(1.0,), rates=(1e9,)), link=curve, kernel_s=1e-3
    )
    hardware = A100.model_copy(update={"measured": measured})
    assert launch_s(hardware) == 1e-3
    assert forward_s(product(10**4, 10**4, 5000), hardware, "fp32") == pytest.approx(10.0)
    assert forward_s(product(10**4, 10**4, 5000), hardware, "bf16") < 1.0
    assert forward_s(MemoryOp("pass", array(1e9), array(0)), hardware) == pytest.approx(1.0)


@given(st.floats(0, 10), st.floats(0, 10))
def test_what_is_exposed_and_what_is_hidden_are_the_whole(seconds, beside):
    exposed, hidden = overlap(array(seconds), array(beside), A100)
    assert exposed.item() + hidden.item() == pytest.approx(seconds)
    assert exposed.item() >= max(0.0, seconds - beside) - 1e-12


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


def test_layers_add_up_to_stages():
    model = qs.find_model("deepseek-v3")
    strategy = qs.Strategy(gpus=128, dp=2, pp=8, ep=8, batch=512, seq=4096, recompute="selective")
    layers = layer_costs(model, H100, strategy)
    every = [layer for layer in layers.layers for _ in range(layer.count)]
    assert len(every) == model.layers + 2
    stages = costs_of(model, H100, strategy)
    counts = [8] * 5 + [7] * 3
    ends = [0, *(1 + sum(counts[: stage + 1]) for stage in range(7)), len(every)]
    for stage, (first, end) in enumerate(pairwise(ends)):
        part = every[first:end]
        for name in ("forward", "backward_input"):
            assert sum(one.amount(name) for one in part) + layers.p2p == pytest.approx(
                1e3 * getattr(stages, name)[stage]
            )
        assert sum(one.amount("backward_weight") for one in part) == pytest.approx(1e3 * stages.backward_weight[stage])
        assert sum(one.activation for one in part) == pytest.approx(stages.activation[stage] / 1e9)
        state = sum(getattr(stages, name)[stage] for name in ("weights", "gradients", "optimizer_state"))
        assert sum(one.state for one in part) == pytest.approx(state / 1e9)


PUBLISHED = [
    ("llama-3-70b", {"tp": 4, "pp": 4}, 5, 0, ["Et*3|(t*4|)*18t*5,L", "Et*4|(t*4|)*18t*4,L"]),
    pytest.param("llama-3-405b", {"tp": 8, "pp": 16}, 8, 0, ["E|(t|)*126,L"], marks=pytest.mark.slow),
    pytest.param("llama-3-405b", {"tp": 8, "pp": 8}, 8, 0, ["Et|(tt|)*62,tL"], marks=pytest.mark.slow),
    pytest.param("deepseek-v3", {"pp": 16, "ep": 8}, 2, 1, ["Et*3|(tt|)*29,m|L"], marks=pytest.mark.slow),
    pytest.param("deepseek-v3", {"pp": 16, "ep": 8}, 1, 1, ["Et*4|(t*4|)*14tmL"], marks=pytest.mark.slow),
    ("deepseek-v3", {"pp": 8, "ep": 8}, 1, 1, ["Et*8|(t*8|)*6t*5mL"]),
    pytest.param("deepseek-v3", {"pp": 4, "ep": 8}, 4, 1, ["Et*4|(t*4|)*14tmL"], marks=pytest.mark.slow),
    pytest.param("qwen3-235b-a22b", {"pp": 8, "ep": 8}, 4, 0, ["Ett|(ttt|)*30,ttL"], marks=pytest.mark.slow),
]
"""Layouts of Megatron-LM's documentation, of Megatron-Bridge's recipes, with the embedding and the loss each in place
of a layer (`--account-for-embedding-in-pipeline-split`), and of Llama 3 (arXiv:2407.21783, section 3.3)."""


@pytest.mark.parametrize(("name", "axes", "chunks", "mtp", "layouts"), PUBLISHED)
def test_cuts_are_as_good_as_even_ones_and_published_ones(name, axes, chunks, mtp, layouts):
    gpus, microbatches = axes["pp"] * axes.get("tp", 1) * axes.get("ep", 1), 2 * axes["pp"]
    batch = microbatches * axes.get("ep", 1)
    strategy = qs.Strategy(
        gpus=gpus, **axes, batch=batch, seq=4096, recompute="selective", sequence_parallel="tp" in axes
    )
    costs = layer_costs(qs.find_model(name), H100, strategy, mtp)
    sizes = {"pp": axes["pp"], "microbatches": microbatches, "chunks": chunks, "effort": 1}
    alone = cut_stages(costs, **sizes).best.value
    found = cut_stages(costs, **sizes, layouts=layouts)
    assert alone <= found.even.value
    assert all(alone <= other.value for other in found.others)
    assert found.best.value <= alone
