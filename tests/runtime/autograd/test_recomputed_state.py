"""Blocks that give other numbers when they are run again for their backward are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import Engine, Transport, run_local

from ..toys import sgd


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        out: Tensor = self.linear(x) * (1 + 0.1 * self.count)
        return out


class Asking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if torch.is_grad_enabled() else 1)


class Nested(nn.Module):
    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.linear, self.drop, self.checkpoints = nn.Linear(4, 4), nn.Dropout(0.5), checkpoints

    def _inner(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.linear(x))
        return out

    def _outer(self, x: Tensor) -> Tensor:
        return checkpoint(self._inner, x, use_reentrant=True) if self.checkpoints else self._inner(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._outer, x, use_reentrant=True) if self.checkpoints else self._outer(x)  # type: ignore[no-any-return]


def train(blocks: list[nn.Module], mesh: str, recompute: int) -> list[float]:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2, recompute=recompute)

    def rank(transport: Transport) -> list[float]:
        engine = Engine(plan, blocks, F.mse_loss, sgd, transport=transport)
        data = torch.randn(3, 2, 8, 4, generator=torch.Generator().manual_seed(0))
        return [float(engine.step(*both).loss) for both in data]

    return run_local(plan.mesh.size, rank)[0]


@pytest.mark.parametrize(
    "block",
    [Counting, lambda: Asking(4, 4), lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))],
    ids=["counter", "grad mode", "spectral norm"],
)
@pytest.mark.parametrize("mesh", ["dp=1", "pp=2"])
def test_blocks_that_are_others_when_run_again_are_refused(block, mesh) -> None:
    with pytest.raises(MisfitError, match=r"gave other numbers when run again .* compile the plan with recompute=0"):
        train([block(), block()], mesh, 1)


def test_dropouts_in_checkpoints_within_checkpoints_draw_what_they_drew() -> None:
    torch.manual_seed(0)
    first, blocks = nn.Linear(4, 4), [Nested(checkpoints=False), Nested(checkpoints=False)]
    plain, nested = ([nn.Linear(4, 4), *(Nested(checkpoints=c) for _ in blocks)] for c in (False, True))
    for made in (plain, nested):
        for block, like in zip(made, [first, *blocks], strict=True):
            block.load_state_dict(like.state_dict())
    expected = train(plain, "dp=1", 0)
    assert train(nested, "pp=2", 0) == pytest.approx(expected, rel=1e-6)
    assert len(set(expected)) == 3
