"""Numbers that blocks draw are distributed as torch's are, and the same each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quintsched.errors import MisfitError
from quintsched.runtime.parallel.draws.mode import KeyedDraws
from quintsched.runtime.parallel.dropout import Masks, Unit


@pytest.fixture
def draws() -> Any:
    block, masks = nn.Identity(), Masks(0)
    mode = KeyedDraws(masks, {0: block})

    def run(function: Callable[[], Any], samples: range = range(4)) -> Any:
        with masks.of(Unit(0, samples)), mode:
            return function()

    return run


MOMENTS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "rand": (torch.rand_like, 1 / 2, 1 / 12),
    "uniform_": (lambda x: x.uniform_(-1, 3), 1, 16 / 12),
    "randn": (torch.randn_like, 0, 1),
    "normal_": (lambda x: x.normal_(2, 3), 2, 9),
    "normal": (lambda x: torch.normal(x, 2 * x), 1, 4),
    "bernoulli": (lambda x: torch.bernoulli(x * 0.3), 0.3, 0.21),
    "bernoulli_": (lambda x: x.bernoulli_(0.3), 0.3, 0.21),
    "bernoulli_ by tensor": (lambda x: x.bernoulli_(torch.full_like(x, 0.3)), 0.3, 0.21),
    "exponential_": (lambda x: x.exponential_(2.0), 0.5, 0.25),
    "geometric_": (lambda x: x.geometric_(0.25), 4, 12),
    "randint": (lambda x: torch.randint(2, 7, x.shape).double(), 4, 2),
    "randint of one bound": (lambda x: torch.randint(5, x.shape, dtype=torch.int32).double(), 2, 2),
    "dropout": (lambda x: functional.dropout(x, 0.3), 1, 3 / 7),
    "rrelu": (lambda x: functional.rrelu(-x, 0.0, 1.0, training=True), -0.5, 1 / 12),
    "poisson": (lambda x: torch.poisson(x * 3), 3, 3),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_moments_are_those_of_torch(name: str, draws: Any) -> None:
    draw, mean, variance = MOMENTS[name]
    found = draws(lambda: draw(torch.ones(4, 50, 200, dtype=torch.float64)))
    error = (variance / found.numel()) ** 0.5
    assert abs(float(found.mean()) - mean) < 5 * error
    assert float(found.var()) == pytest.approx(variance, rel=0.06)
    assert torch.equal(found, draws(lambda: draw(torch.ones(4, 50, 200, dtype=torch.float64))))


def test_alpha_dropout_keeps_mean_and_variance(draws: Any) -> None:
    x = torch.randn(4, 100, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for function in (functional.alpha_dropout, functional.feature_alpha_dropout):
        found = draws(lambda f=function: f(x, 0.2, training=True))
        assert abs(float(found.mean())) < 0.1
        assert float(found.var()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_uniform_numbers_stay_below_one(dtype: torch.dtype, draws: Any) -> None:
    found = draws(lambda: torch.rand(4, 1_000_000, dtype=dtype))
    assert found.dtype == dtype
    assert float(found.max()) < 1
    assert float(found.min()) >= 0


def test_attention_without_dropout_in_effect_is_that_of_torch(draws: Any) -> None:
    q, k, v = torch.randn(3, 4, 2, 5, 8, dtype=torch.float64)
    mask = torch.rand(5, 5) < 0.6
    mask[1] = False
    for options in ({"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask.double()}, {"scale": 0.3}, {}):
        expected = functional.scaled_dot_product_attention(q, k, v, **options)
        found = draws(lambda o=options: functional.scaled_dot_product_attention(q, k, v, dropout_p=1e-12, **o))
        assert torch.allclose(found, expected, atol=1e-12)
    expected = functional.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)
    found = draws(
        lambda: functional.scaled_dot_product_attention(q, k[:, :1], v[:, :1], dropout_p=1e-12, enable_gqa=True)
    )
    assert torch.allclose(found, expected, atol=1e-12)


def _seeded_by_hand(seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(8, generator=generator), torch.empty(3).normal_(generator=generator)


def _seeded_in_a_fork(seed: int) -> tuple[torch.Tensor, ...]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.rand(4), functional.dropout(torch.ones(16)), torch.randperm(8)


@contextmanager
def _fixed(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _seeded_by_a_helper(seed: int) -> tuple[torch.Tensor, ...]:
    with _fixed(seed):
        return torch.rand(4), torch.randperm(8)


@pytest.mark.parametrize("seeded", [_seeded_by_hand, _seeded_in_a_fork, _seeded_by_a_helper])
def test_what_follows_from_a_seed_in_the_forward_is_plain_torchs(seeded: Any, draws: Any) -> None:
    for seed in (0, 5):
        torch.manual_seed(0)
        expected = seeded(seed)
        torch.rand(1)
        found = draws(lambda s=seed: (seeded(s), torch.rand(4)))
        assert all(map(torch.equal, found[0], expected))
        assert torch.equal(found[1], draws(lambda s=seed: (seeded(s), torch.rand(4)))[1])


def test_a_generator_that_lives_on_is_refused(draws: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    draws(lambda: torch.rand(4, generator=generator))
    with pytest.raises(MisfitError, match="not seeded in this forward"):
        draws(lambda: torch.rand(4, generator=generator))
