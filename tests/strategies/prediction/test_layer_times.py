"""Costs of layers: they add up to those of stages, and cuts by them are as good as published ones."""

from itertools import pairwise

import pytest

import quintsched as qs
from quintsched.solve import cut_stages
from quintsched.strategies.prediction.layer_times import layer_costs
from quintsched.strategies.prediction.simulated_strategy import costs_of

H100 = qs.find_hardware("h100")


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
