"""Static memory: the formulas of ZeRO."""

import numpy as np
import pytest

from quintsched.strategies.descriptions.parameters import Held
from quintsched.strategies.prediction.memory.weights_grads_optimizer_bytes import state_bytes


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
