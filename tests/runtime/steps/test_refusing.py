"""A step that some ranks cannot begin: refused in one voice, or the fault of the one whose own code failed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.errors import CodeError, MisfitError, QuintschedError, StallError
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.train.losses import cross_entropy_sum

from ..toys import CLASSES, sgd

FEATURES = 8


class Failing(nn.Module):
    """A layer that takes no units of so many samples."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self._samples = samples
        self.inner = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == self._samples:
            raise KeyError("no such token")
        return self.inner(x)


def errors_of(mesh: str, failing: tuple[int, ...], samples: int, features: int) -> dict[int, QuintschedError]:
    """Return what each rank raises where some take no such units, of 2 in training and 3 in evaluation."""
    told: dict[int, QuintschedError] = {}
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2)

    def work(transport: Transport) -> None:
        blocks = [nn.Identity, partial(Failing, samples if transport.rank in failing else 0)]
        engine = Engine(plan, blocks, cross_entropy_sum, sgd, transport=transport)
        inputs, targets = torch.ones(6, features), torch.zeros(6, dtype=torch.int64)
        try:
            engine.step(inputs[:4], targets[:4])
            engine.evaluate(inputs, targets)
        except QuintschedError as error:
            told[transport.rank] = error
            raise

    with pytest.raises(QuintschedError):
        run_local(plan.mesh.size, work, 20)
    return told


@pytest.mark.parametrize("samples", [2, 3])
@pytest.mark.parametrize(("mesh", "odd"), [("pp=2", 0), ("pp=2", 1), ("dp=2", 1), ("dp=2,pp=2", 2)])
def test_code_that_raises_on_one_rank_alone_is_that_ranks_own_error(mesh: str, odd: int, samples: int) -> None:
    told = errors_of(mesh, (odd,), samples, FEATURES)
    error = told.pop(odd)
    assert isinstance(error, CodeError)
    assert isinstance(error.__cause__, KeyError)
    assert str(error).startswith(f"rank {odd} (")
    assert f", KeyError: block 1 cannot take float32 ({samples}, 8): 'no such token'" in str(error)
    assert told
    assert all(isinstance(theirs, StallError) and f"rank {odd}" in str(theirs) for theirs in told.values())


@pytest.mark.parametrize("mesh", ["pp=2", "dp=2", "dp=2,pp=2"])
def test_what_no_block_takes_is_refused_by_all_ranks(mesh: str) -> None:
    told = errors_of(mesh, (), 0, FEATURES + 1)
    assert len(told) == qs.Mesh.parse(mesh).size
    assert {type(error) for error in told.values()} == {MisfitError}
    assert all("block 1 cannot take float32 (2, 9)" in str(error) for error in told.values())
