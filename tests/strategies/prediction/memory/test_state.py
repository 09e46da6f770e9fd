"""Static memory: the formulas of ZeRO, and the buffers that shards begin in."""

import numpy as np
import pytest

from quintsched.strategies.descriptions.parameters import Held
from quintsched.strategies.descriptions.presets_and_files import find_model
from quintsched.strategies.prediction.memory.weights_grads_optimizer_bytes import state_bytes
from tests.runtime.weights_and_gradients.bucket_layout import BucketLayout, stage_tensors


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


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("replicas", [1, 2, 5, 8])
def test_buckets_are_the_formula_and_what_alignment_leaves_unused(zero: int, replicas: int) -> None:
    model = find_model("gpt2")
    layout = BucketLayout(replicas=replicas, expert_replicas=replicas, zero=zero, element=2)
    stage = stage_tensors(model, layout, range(3), seq=1024, first=True, last=False)
    numbers = sum(tensor.numbers for tensor in stage)
    found = layout.state_bytes([stage])
    held = Held(numbers, 0)
    formula = state_bytes(held, held, 2, zero=zero, replicas=replicas, expert_replicas=replicas)
    moved = {2: 4 * numbers, 3: 6 * numbers}.get(zero, 0) if replicas > 1 else 0  # our unit is the stage, gathered once
    exact = sum(formula.values()) - formula["gathered"] + moved
    unused = 32 * (len(stage) + replicas) * 18
    assert abs(sum(found.values()) - exact) <= unused + 4 * len(stage)
