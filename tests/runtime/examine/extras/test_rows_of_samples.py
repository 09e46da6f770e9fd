"""Extras with as many rows as there are samples: cut where they belong to these, refused where they do not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import Engine, run_local

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


def places(self, x, extra):
    return self.fc(x) + self.positions(extra)


def scales(self, x, extra):
    return self.fc(x) * extra


def scales_samples(self, x, extra):
    return self.fc(x) * extra[:, None, None]


def adds_domain(self, x, extra):
    return self.fc(x) + self.positions(extra)[:, None]


MEMORY = torch.randn(SAMPLES, SAMPLES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
OF_NO_SAMPLE = {"memory": (attends, MEMORY), "positions": (places, torch.arange(SAMPLES)), "scale": (scales, MEMORY[0])}
OF_SAMPLES = {"weights": (scales_samples, MEMORY[0]), "domains": (adds_domain, torch.arange(SAMPLES) % 3)}


def run(forward, extra, microbatches):
    """Return the loss of a step, and that of one process."""
    torch.manual_seed(0)
    blocks = [of_kind(forward)().double(), nn.Linear(SAMPLES, 3).double()]
    inputs = torch.randn(SAMPLES, SAMPLES, 6, dtype=torch.float64)
    targets = torch.randn(SAMPLES, SAMPLES, 3, dtype=torch.float64)
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=microbatches)

    def train(transport):
        engine = Engine(
            plan, copy.deepcopy(blocks), F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), transport=transport
        )
        return float(engine.step(inputs, targets, extra=extra).loss)

    expected = F.mse_loss(blocks[1](blocks[0](inputs, extra)), targets) if torch.is_tensor(extra) else None
    return run_local(2, train)[0], None if expected is None else expected.item()


@pytest.mark.parametrize("microbatches", [2, SAMPLES])
@pytest.mark.parametrize("name", OF_SAMPLES)
def test_those_of_samples_are_cut(name, microbatches):
    found, expected = run(*OF_SAMPLES[name], microbatches)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("microbatches", [2, SAMPLES])
@pytest.mark.parametrize("name", OF_NO_SAMPLE)
def test_those_of_no_sample_are_refused(name, microbatches):
    with pytest.raises(MisfitError, match=r"uses 'extra' for all samples alike|cannot take"):
        run(*OF_NO_SAMPLE[name], microbatches)


@pytest.mark.parametrize("name", ["positions", "scale"])
def test_they_are_taken_with_one_row(name):
    forward, extra = OF_NO_SAMPLE[name]
    found, expected = run(forward, extra[None], SAMPLES)
    assert found == pytest.approx(expected, rel=1e-12)


def of_list(self, x, extra):
    return torch.stack([row * extra[k] for k, row in enumerate(self.fc(x))])


def test_lists_with_an_entry_for_each_sample_are_refused():
    with pytest.raises(MisfitError, match="extra is a list of 8 values beside as many samples"):
        run(of_list, list(range(SAMPLES)), 2)
    run(of_list, list(range(SAMPLES)), 1)
    run(of_list, list(range(SAMPLES + 1)), 2)
