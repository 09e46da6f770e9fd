import pytest
import torch
from torch.nn import functional as F

from quintsched.errors import UsageError
from quintsched.runtime.data import IGNORED_TARGET
from quintsched.runtime.train.built_in_losses import CausalZLoss, ZLoss, correct_sum, cross_entropy_sum, with_z_loss


@pytest.mark.parametrize(
    ("dtype", "summed"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_bf16_still_counts_beyond_256(dtype: torch.dtype, summed: torch.dtype) -> None:
    logits, targets = torch.zeros(301, 2, dtype=dtype), torch.zeros(301, dtype=torch.int64)
    loss, weight = cross_entropy_sum(logits, targets)
    assert weight == correct_sum(logits, targets) == 301
    assert {loss.dtype, weight.dtype, correct_sum(logits, targets).dtype} == {summed}


def test_a_z_loss_by_its_formula() -> None:
    logits, targets = torch.randn(2, 3, 4, dtype=torch.float64), torch.tensor([[0, 1, IGNORED_TARGET], [3, 2, 1]])
    total, weight = ZLoss(0.1)(logits, targets)
    counts = targets != IGNORED_TARGET
    expected = cross_entropy_sum(logits, targets)[0] + 0.1 * logits.logsumexp(-1)[counts].square().sum()
    torch.testing.assert_close(total, expected)
    assert weight == 5
    causal, _ = CausalZLoss(0.1)(logits, targets)
    torch.testing.assert_close(causal, ZLoss(0.1)(logits[:, :-1], targets[:, 1:])[0])
    with pytest.raises(UsageError, match="z_loss is for cross-entropies"):
        with_z_loss(F.mse_loss, 0.1)
