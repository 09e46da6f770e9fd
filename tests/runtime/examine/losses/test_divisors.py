"""What a loss was divided by at its end, and whether that is found from data."""

import pytest
import torch
from torch.nn import functional as F

from quintsched.runtime.examine.losses.divisors import counts, divisor_of

MASK = torch.tensor([[True, False], [True, True], [False, False]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("loss", "is_counted"),
    [
        (lambda x: x.sum() / len(x), True),
        (lambda x: (x * MASK).sum() / MASK.sum(), True),
        (lambda x: (x * MASK).sum() / MASK.to(x.dtype).sum(), True),
        (lambda x: F.cross_entropy(x, torch.tensor([0, 1, 1])), True),
        (lambda x: x.sum() / 10, False),
        (lambda x: x.sum() / 2.5, False),
        (lambda x: x.sum(), False),
    ],
)
def test_a_divisor_is_found_from_data_or_the_number_of_samples(dtype, loss, is_counted):
    x = torch.ones(3, 2, dtype=dtype, requires_grad=True)
    assert counts(divisor_of(loss(x)), 3) == is_counted
