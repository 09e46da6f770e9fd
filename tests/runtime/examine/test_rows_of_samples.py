"""Extras with as many rows as there are samples: cut where they belong to these, refused where they do not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ...helpers.training import train_alone
from ..trials import refused, sgd, taken

SAMPLES = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, SAMPLES)
        self.positions = nn.Embedding(SAMPLES, SAMPLES)


def of_kind(forward):
    return type("Block", (Block,), {"forward": forward})


def attends(self, x, extra):
    h = self.fc(x)
    return h + (h.mean(1) @ extra.T).softmax(-1)[:, None, :] @ extra


MEMORY = torch.randn(SAMPLES, SAMPLES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
NUMBERS = torch.arange(SAMPLES)
OF_NO_SAMPLE = {
    "memory": (attends, MEMORY),
    "positions": (lambda self, x, extra: self.fc(x) + self.positions(extra), NUMBERS),
    "scale": (lambda self, x, extra: self.fc(x) * extra, MEMORY[0]),
}
OF_SAMPLES = {
    "weights": (lambda self, x, extra: self.fc(x) * extra[:, None, None], MEMORY[0]),
    "domains": (lambda self, x, extra: self.fc(x) + self.positions(extra)[:, None], NUMBERS % 3),
}


def given(forward, extra):
    """Return blocks, and a batch."""
    torch.manual_seed(0)
    blocks = [of_kind(forward)().double(), nn.Linear(SAMPLES, 3).double()]
    inputs = torch.randn(SAMPLES, SAMPLES, 6, dtype=torch.float64)
    return blocks, [(inputs, torch.randn(SAMPLES, SAMPLES, 3, dtype=torch.float64), {"extra": extra})]


def require_equality(forward, extra, microbatches):
    blocks, batches = given(forward, extra)
    expected = train_alone(blocks, F.mse_loss, sgd, batches).losses  # which is given the extra whole
    assert taken(blocks, batches, microbatches=microbatches) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("microbatches", [2, SAMPLES])
@pytest.mark.parametrize("name", OF_SAMPLES)
def test_those_of_samples_are_cut(name, microbatches):
    require_equality(*OF_SAMPLES[name], microbatches)


@pytest.mark.parametrize("microbatches", [2, SAMPLES])
@pytest.mark.parametrize("name", OF_NO_SAMPLE)
def test_those_of_no_sample_are_refused(name, microbatches):
    said = refused(*given(*OF_NO_SAMPLE[name]), microbatches=microbatches)
    assert "uses 'extra' for all samples alike" in said or "cannot take" in said


def of_list(self, x, extra):
    return torch.stack([row * extra[k] for k, row in enumerate(self.fc(x))])


def test_lists_with_an_entry_for_each_sample_are_refused():
    of_each = list(range(SAMPLES))
    assert "extra is a list of 8 values beside as many samples" in refused(*given(of_list, of_each))
    taken(*given(of_list, of_each), microbatches=1)
    taken(*given(of_list, [*of_each, 8]))
