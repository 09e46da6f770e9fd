"""Keyed dropout: masks that no mesh and no schedule changes, of the quality of independent draws."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.comm import SelfGroup
from quintsched.runtime.parallel.mesh_independent_dropout import (
    ColumnRowPair,
    KeyedDropout,
    Masks,
    MaskUnit,
    key_dropouts,
)

from ..toys import sgd


def keyed(p: float = 0.5, name: str = "drop", number: int = 3, masks: Masks | None = None) -> KeyedDropout:
    block = nn.ModuleDict({name: nn.Dropout(p)})
    key_dropouts(block, number, masks or Masks(0))
    layer = block[name]
    assert isinstance(layer, KeyedDropout)
    return layer


def drawn(layer: KeyedDropout, unit: MaskUnit, *shape: int) -> Tensor:
    """Return the output of a dropout for ones: 0, or 1 / (1 - p)."""
    with layer.masks.draw_for(unit):
        out: Tensor = layer(torch.ones(shape, dtype=torch.float64))
    return out


SOME = MaskUnit(5, range(16, 24))


def normal(layer: KeyedDropout, unit: MaskUnit = SOME) -> Tensor:
    """A mask as numbers of mean 0 and variance 1."""
    stays = drawn(layer, unit, 8, 64, 256).bool()
    numbers: Tensor = (stays.double() - (1 - layer.p)) / (layer.p * (1 - layer.p)) ** 0.5
    return numbers


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


def test_pairs_of_features_are_no_more_alike_than_independent_ones() -> None:
    layer = keyed(0.5)
    bits = drawn(layer, MaskUnit(0, range(4)), 4, 256, 1024).flatten(0, 1).sub(1).float()  # -1 or 1
    alike = (bits.T @ bits).square().fill_diagonal_(0.0).double() / len(bits)
    pairs = 1024 * 1023 / 2
    assert abs(float(alike.sum()) / 2 / pairs - 1) < 4 * (2 / pairs) ** 0.5


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
    assert x.grad is not None
    assert torch.equal(x.grad, kept)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_backward_keeps_a_byte_per_number(dtype: torch.dtype) -> None:
    layer, x = keyed(0.2), torch.ones(8, 100, 3, dtype=dtype, requires_grad=True)
    saved: list[int] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), layer.masks.draw_for(SOME):
        y = layer(x)
    assert y.dtype == dtype
    assert sum(saved) == x.numel()


def test_odd_probabilities_and_empty_tensors() -> None:
    assert not drawn(keyed(1.0), SOME, 8, 5).any()
    assert drawn(keyed(0.0), SOME, 8, 5).all()
    assert drawn(keyed(), SOME, 8, 0, 4).shape == (8, 0, 4)
    assert drawn(keyed(), SOME, 16).shape == (16,)
    assert drawn(keyed().eval(), SOME, 8, 5).sum() == 40


def test_a_keyed_dropout_shows_nowhere_and_is_copied_as_a_plain_one() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.ReLU())
    module, group = copy.deepcopy(plain), SelfGroup(0, torch.device("cpu"))
    key_dropouts(module, 0, Masks(0))
    layer = module[1]
    assert isinstance(layer, KeyedDropout)
    layer.pair, layer.sequence = ColumnRowPair(group), group
    assert repr(module) == repr(plain)
    assert list(module.state_dict()) == list(plain.state_dict())
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(saved, weights_only=False)):
        assert type(twin[1]) is nn.Dropout
        assert set(vars(twin[1])) == set(vars(plain[1]))
        assert twin[1].p == 0.3


def test_outside_of_a_unit_it_is_an_ordinary_dropout_and_another_engine_takes_it_over() -> None:
    layer, x, masks = keyed(), torch.ones(100), Masks(1)
    torch.manual_seed(1)
    found = layer(x)
    torch.manual_seed(1)
    assert torch.equal(found, nn.functional.dropout(x, 0.5))
    key_dropouts(nn.ModuleDict({"other": layer}), 2, masks)
    assert layer.masks is masks
    assert layer.site == "2.other"


def test_a_dropout_of_two_blocks_is_refused() -> None:
    shared, plan = nn.Dropout(0.1), qs.compile("1f1b", mesh="pp=1", microbatches=1)
    blocks = [nn.Sequential(nn.Linear(4, 4), shared), nn.Sequential(nn.Linear(4, 4), shared)]
    said = r"blocks 0 and 1 share the dropout '1'; give each block a dropout for itself"
    with pytest.raises(qs.MisfitError, match=said):
        Engine(plan, blocks, nn.functional.mse_loss, sgd)
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))  # which drops nothing
    engine = Engine(plan, [block, block], nn.functional.mse_loss, sgd)
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    expected = nn.functional.mse_loss(block(block(x)), y).item()
    assert engine.step(x, y).loss.item() == pytest.approx(expected)


def test_an_input_without_samples_in_front_is_refused() -> None:
    with pytest.raises(qs.MisfitError, match=r"the dropout '3.drop' is given \(6, 2\) for 8 samples; the first"):
        drawn(keyed(), SOME, 6, 2)
