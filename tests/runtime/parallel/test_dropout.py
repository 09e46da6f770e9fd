"""Keyed dropout: masks as good as independent draws, which no mesh, schedule or interruption changes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.blocks.block_builders import build_block
from quintsched.runtime.parallel.mesh_independent_dropout import KeyedDropout, Masks, MaskUnit, key_dropouts
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ...helpers.training import check_equality, train_ranks
from ..toys import CLASSES, cross_entropy_plainly, ids_task, sgd, tiny_gpt


def keyed(p: float = 0.5, name: str = "drop", number: int = 3, masks: Masks | None = None) -> KeyedDropout:
    block = nn.ModuleDict({name: nn.Dropout(p)})
    key_dropouts(block, number, masks or Masks(0))
    return block[name]


def drawn(layer: KeyedDropout, unit: MaskUnit, *shape: int) -> Tensor:
    """Return the output of a dropout for ones: 0, or 1 / (1 - p)."""
    with layer.masks.draw_for(unit):
        out: Tensor = layer(torch.ones(shape, dtype=torch.float64))
    return out


SOME = MaskUnit(5, range(16, 24))


def normal(layer: KeyedDropout, unit: MaskUnit = SOME) -> Tensor:
    """A mask as numbers of mean 0 and variance 1."""
    stays = drawn(layer, unit, 8, 64, 256).bool()
    return (stays.double() - (1 - layer.p)) / (layer.p * (1 - layer.p)) ** 0.5


def deviation(numbers: Tensor) -> float:
    """By how many standard deviations the mean of independent numbers differs from 0."""
    return abs(float(numbers.mean())) * float(numbers.numel() ** 0.5)


@pytest.mark.parametrize("p", [0.02, 0.1, 0.5, 0.9])
def test_bits_are_as_good_as_independent(p: float) -> None:
    bits = normal(keyed(p))
    found = {"all": deviation(bits)}
    for lag in (1, 2, 3, 4, 8, 16, 32, 63):
        found[f"features, lag {lag}"] = deviation(bits[..., lag:] * bits[..., :-lag])
        found[f"rows, lag {lag}"] = deviation(bits[:, lag:] * bits[:, :-lag])
        places = torch.arange(256)
        found[f"features, flip {lag}"] = deviation((bits * bits[..., places ^ lag])[..., (places ^ lag) > places])
    for lag in (1, 2, 4):
        found[f"samples, lag {lag}"] = deviation(bits[lag:] * bits[:-lag])
    assert max(found.values()) < 4, found
    for means in (bits.mean((0, 1)) * 512**0.5, bits.mean((0, 2)) * 2048**0.5, bits.mean(2).flatten() * 16):
        spread = float(means.square().mean())
        assert abs(spread - 1) < 4 * (3 / means.numel()) ** 0.5, spread


def test_sites_steps_seeds_and_calls_are_independent() -> None:
    masks, p = Masks(0), 0.3
    layer = keyed(p, masks=masks)
    with masks.draw_for(SOME):
        twice = [layer(torch.ones(8, 64, 256)) for _ in range(2)]
    again = (twice[1].double() / twice[1].max() - (1 - p)) / (p * (1 - p)) ** 0.5
    units = MaskUnit(6, SOME.samples), MaskUnit(5, range(24, 32))
    keys = keyed(p, "drop1", masks=masks), keyed(p, number=4, masks=masks), keyed(p, masks=Masks(1))
    others = [again, *(normal(layer, unit) for unit in (SOME, *units)), *map(normal, keys)]
    assert torch.equal(drawn(layer, SOME, 8, 64, 256) > 0, twice[0] > 0)
    for number, one in enumerate(others):
        for other in others[:number]:
            assert deviation(one * other) < 4


def test_what_stays_is_scaled_and_the_backward_drops_the_same() -> None:
    layer, x = keyed(0.2), torch.randn(8, 3, 5, dtype=torch.float64, requires_grad=True)
    with layer.masks.draw_for(SOME):
        y = layer(x)
    kept = drawn(layer, SOME, 8, 3, 5)
    assert set(kept.unique().tolist()) == {0.0, 1.25}
    assert torch.equal(y, x * kept)
    y.sum().backward()
    assert torch.equal(x.grad, kept)


def test_a_dropout_of_two_blocks_is_refused() -> None:
    shared, plan = nn.Dropout(0.1), qs.compile("1f1b", mesh="pp=1", microbatches=1)
    blocks = [nn.Sequential(nn.Linear(4, 4), shared), nn.Sequential(nn.Linear(4, 4), shared)]
    said = r"blocks 0 and 1 share the dropout '1'; give each block a dropout for itself"
    with pytest.raises(qs.MisfitError, match=said):
        Engine(plan, blocks, nn.functional.mse_loss, sgd)
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))  # which drops nothing
    engine = Engine(plan, [block, block], nn.functional.mse_loss, sgd)
    x, y = torch.randn(2, 2, 4)
    expected = nn.functional.mse_loss(block(block(x)), y).item()
    assert engine.step(x, y).loss.item() == pytest.approx(expected)


LENGTH = 8


class Layouts(nn.Module):
    """Drops out of tokens, of heads, of tokens in one row, and of one vector per sample; of the first of them twice."""

    def __init__(self, first):
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, CLASSES) if first else nn.Linear(CLASSES, CLASSES)
        self.drop, self.heads = nn.Dropout(0.4), nn.Dropout(0.3, inplace=True)
        self.flat, self.never = nn.Dropout(0.2), nn.Dropout(0.0)

    def forward(self, x, past=None, context=None):
        x = self.drop(self.tokens(x))
        x = x + self.drop(x.sin())
        heads = x.unflatten(-1, (2, -1)) * 1.5
        x = x + self.never(self.heads(heads).flatten(-2))
        return x + self.flat(x.flatten(0, 1)).view(x.shape)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("schedule", "mesh", "slices"),
    [("1f1b", "pp=1", 1), ("1f1b", "dp=2,pp=2", 1), ("1f1b", "cp=4", 1), ("seq-1f1b", "pp=2", 4)],
)
def test_tensors_of_any_layout_with_the_samples_first(schedule: str, mesh: str, slices: int) -> None:
    plan, batches = qs.compile(schedule, mesh=mesh, microbatches=2, slices=slices), ids_task(2, 4, LENGTH).batches
    blocks = [lambda: Layouts(True), *[lambda: Layouts(False)] * 3]
    check_equality(plan, blocks, cross_entropy_plainly, sgd, batches, masks=Masks(0), microbatches=4, clip=1.0)


@pytest.mark.slow
def test_dropout_from_a_later_step_on_counts_samples_or_is_refused() -> None:
    def losses_on(replicas: int, samples: int) -> list[float]:
        plan, batches = qs.compile("gpipe", mesh=f"dp={replicas}", microbatches=2), ids_task(2, samples, LENGTH).batches
        blocks = [build_block(block, number, 0, torch.float64) for number, block in enumerate(tiny_gpt(LENGTH))]
        return train_ranks(plan, blocks, cross_entropy_sum, sgd, batches, before=begin_to_drop)[0].losses

    def begin_to_drop(blocks: Any, step: int) -> None:
        for module in blocks[1].modules() if step else ():
            if isinstance(module, nn.Dropout):
                module.p = 0.5

    assert losses_on(2, 8) == pytest.approx(losses_on(1, 8), abs=1e-12)
    with pytest.raises(qs.MisfitError, match="from this step on, and none in the first"):
        losses_on(2, 7)


def test_odd_probabilities_and_empty_tensors() -> None:
    assert not drawn(keyed(1.0), SOME, 8, 5).any()
    assert drawn(keyed(0.0), SOME, 8, 5).all()
    assert drawn(keyed(), SOME, 8, 0, 4).shape == (8, 0, 4)
    assert drawn(keyed(), SOME, 16).shape == (16,)
    assert drawn(keyed().eval(), SOME, 8, 5).sum() == 40
