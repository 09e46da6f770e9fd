"""The smallest walk through a plan trains as one process does."""

import inspect
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import quintsched as qs
from quintsched.runtime import minimal

from ..helpers.training import Outcome, require_equal, train_alone
from .grid_models import TRAINING


def pieces_of(plan: qs.Plan) -> list[nn.Module]:
    torch.manual_seed(0)
    parts = {plan.layout.part_of(stage) for stage in range(len(plan.stage_to_pp))}
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in parts]


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(16, 4).double(), torch.randn(16, 4).double()) for _ in range(count)]


adam = partial(torch.optim.AdamW, lr=1e-2)


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("dp", [1, 2])
def test_every_schedule_trains_as_one_process(name, dp):
    plan = qs.compile(name, mesh=f"dp={dp},pp=2", microbatches=4, buckets_per_stage=2, overlap=name == "dualpipe-v")
    pieces, given = pieces_of(plan), batches()
    expected = train_alone(nn.Sequential(*pieces), mse_loss, adam, given)
    losses = minimal.train(plan, pieces, mse_loss, adam, given)
    require_equal([Outcome(losses, nn.Sequential(*pieces).state_dict())], expected)


@pytest.mark.parametrize(
    "more",
    [
        {"mesh": "pp=2,tp=2"},
        {"mesh": "dp=2,pp=2", "zero": 1},
        {"mesh": "pp=2", "recompute": 1},
        {"mesh": "dp=2,pp=2", "microbatches": 3},
    ],
)
def test_what_it_does_not_know_is_refused(more):
    plan = qs.compile("1f1b", **{"microbatches": 2, **more})
    with pytest.raises(qs.UsageError, match="train by Engine"):
        minimal.train(plan, pieces_of(plan), mse_loss, adam, batches(1))


def test_the_error_of_a_rank_ends_all():
    plan = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2)
    with pytest.raises(ZeroDivisionError):
        minimal.train(plan, pieces_of(plan), lambda *_: 1 / 0, adam, batches(1))


def test_it_is_short():
    assert sum(bool(line.strip()) for line in inspect.getsource(minimal).splitlines()) <= 150
