"""Torch's own generators are seeded round a block, and as they were behind it, also where ranks are threads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.comm.random_generators import SeededGenerators
from quintsched.runtime.parallel.mesh_independent_dropout import Masks, MaskUnit
from quintsched.runtime.parallel.seeded_block_draws import BlockDraws

from ..toys import sgd


@pytest.fixture
def draws() -> Any:
    masks = Masks(0)
    mode = BlockDraws(masks, {0: nn.Identity()})

    def run(function: Callable[[], Any]) -> Any:
        with masks.draw_for(MaskUnit(0, range(4))), mode.running(0):
            return function()

    return run


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


def _seeded_by_hand(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(8, generator=generator), torch.empty(3).normal_(generator=generator)


def _seeded_in_a_fork(seed: int) -> tuple[Tensor, ...]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.rand(4), functional.dropout(torch.ones(16)), torch.randperm(8)


@pytest.mark.parametrize("seeded", [_seeded_by_hand, _seeded_in_a_fork])
def test_numbers_that_follow_from_a_seed_in_the_forward_are_plain_torchs(seeded: Any, draws: Any) -> None:
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
    with pytest.raises(qs.MisfitError, match="not seeded in this forward"):
        draws(lambda: torch.rand(4, generator=generator))


class Noisy(nn.Linear):
    def again(self, x):
        return super().forward(x) * torch.randn_like(x)

    def forward(self, x):
        x = functional.dropout(x) + torch.rand(len(x), 1)
        return checkpoint(self.again, x, use_reentrant=False)


def test_steps_do_not_move_the_generator_of_the_loop_and_go_on_after_a_resume() -> None:
    blocks = [lambda: nn.Linear(8, 8), lambda: Noisy(8, 8)]

    def make() -> Engine:
        return Engine(qs.compile("1f1b", mesh="dp=1", microbatches=2), blocks, functional.mse_loss, sgd, seed=1)

    x, y = torch.randn(2, 4, 8)
    engine, resumed = make(), make()
    before = torch.get_rng_state()
    engine.step(x, y)
    resumed.load_state_dict(engine.state_dict())
    losses = engine.step(x, y).loss.item(), resumed.step(x, y).loss.item()
    assert losses[0] == losses[1]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_thread_that_waits_lets_others_draw() -> None:
    def run(transport: Transport) -> list[Tensor]:
        device, found = torch.device("cpu"), []
        with SeededGenerators(transport.rank, device), SeededGenerators(transport.rank, device):
            for _ in range(3):
                found.append(torch.rand(2))
                transport.world_group().all_reduce(torch.zeros(1)).wait()
        return found

    before = torch.get_rng_state()
    for rank, found in enumerate(run_local(3, run)):
        generator = torch.Generator().manual_seed(rank)
        assert all(torch.equal(one, torch.rand(2, generator=generator)) for one in found)
    assert torch.equal(torch.get_rng_state(), before)
