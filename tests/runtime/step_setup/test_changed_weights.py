"""Weights that a forward changes: refused where they have copies, as in one process where they have none."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError
from quintsched.runtime import Engine

from ...helpers.blocks import of_layers
from ...helpers.training import call_with_share
from ..trials import on_ranks

WIDTH = 4


Bounded = of_layers("Bounded", lambda: {"rows": nn.Embedding(8, WIDTH, max_norm=0.5)}, lambda self, ids: self.rows(ids))


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        self.rows.weight.data.div_(self.rows.weight.data.norm(dim=1, keepdim=True))
        return self.rows(ids)


class Replaced(Normalised):
    def forward(self, ids: Tensor) -> Tensor:
        self.rows.weight.data = self.rows.weight.data / 2
        return self.rows(ids)


class Shifted(Normalised):
    """Is shifted by its first input, as layers are that take their start from data."""

    def forward(self, ids: Tensor) -> Tensor:
        if self.training and not hasattr(self, "done"):
            self.done = True
            self.rows.weight.data += ids.sum()
        return self.rows(ids)


class Created(Normalised):
    def forward(self, ids: Tensor) -> Tensor:
        if not hasattr(self, "more"):
            self.more = nn.Linear(WIDTH, WIDTH)
        return self.more(self.rows(ids))


def train(block: Callable[[], nn.Module], mesh: str, **more: Any) -> list[Tensor]:
    def work(engine: Engine) -> Tensor:
        ids = torch.arange(8)
        call_with_share(engine, engine.step, (ids, ids % WIDTH))
        return engine.full_weights().get("0.rows.weight", torch.zeros(0))

    still = partial(torch.optim.SGD, lr=0.0)
    blocks = [block, lambda: nn.Linear(WIDTH, WIDTH)]
    return on_ranks(work, blocks, nn.CrossEntropyLoss(), mesh=mesh, optimizer=still, **more)


COPIED = [
    *((block, {"mesh": "dp=2,pp=2", "zero": 1}, "changes") for block in (Bounded, Normalised, Replaced)),
    (Replaced, {"mesh": "dp=2", "zero": 3}, "changes"),
    *((block, {"mesh": "pp=2", "recompute": (1, 1)}, "changes") for block in (Normalised, Replaced)),
    *((block, {"mesh": "dp=2", "microbatches": 4}, "may differ") for block in (Bounded, Replaced, Shifted)),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("block", "request_of", "why"), COPIED)
def test_a_forward_that_changes_weights_is_refused_where_these_have_copies(block, request_of, why):
    own = rf"block 0 \({block.__name__}\) changes its weight 'rows.weight'"
    words = own if why == "changes" else r"weight 'rows.weight'|weights that they change"
    with pytest.raises(MisfitError, match=words):
        train(block, **request_of)


@pytest.mark.parametrize("request_of", [{"mesh": "dp=1"}, {"mesh": "pp=2"}, {"mesh": "dp=2", "zero": 3}])
def test_a_weight_that_a_forward_creates_is_refused(request_of: dict[str, Any]) -> None:
    with pytest.raises(MisfitError, match=r"block 0 \(Created\) creates its weight 'more.weight' in a forward"):
        train(Created, **request_of)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_weights_that_forwards_change_are_named_where_a_step_has_several(microbatches, caplog):
    train(Shifted, "pp=2", microbatches=microbatches)
    named = ["block 0 (Shifted).rows.weight: changed by" in record.message for record in caplog.records]
    assert sum(named) == microbatches - 1


@pytest.mark.parametrize("mesh", ["dp=1", "pp=2"])
def test_it_is_as_in_one_process_where_there_is_one_copy(mesh: str) -> None:
    weights = [w for w in train(Bounded, mesh) if len(w)]
    assert all((weight.norm(dim=1) < 0.5001).all() for weight in weights)
    assert weights
