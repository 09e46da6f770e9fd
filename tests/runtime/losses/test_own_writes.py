"""Side effects of a loss may not affect its value; what its trial runs write, and engines meanwhile, stays apart."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ...helpers.training import random_batch
from ..trials import refused, taken


class Writing(nn.Module):
    """A mean of squares, and something that its calls write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.first, self.mask, self.seen, self.last = 0, None, None, list[float](), torch.zeros(())
        self.register_buffer("average", torch.zeros((), dtype=torch.float64))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        return self.written(nn.functional.mse_loss(output, targets), output)

    def written(self, loss: Tensor, output: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(loss.item())
        self.last = loss.detach()
        if self.mask is None or self.mask.shape != output.shape[1:]:
            self.mask = torch.ones(output.shape[1:], dtype=output.dtype)
        return loss + 0 * (output * self.mask).mean()


class Annealed(Writing):
    def written(self, loss: Tensor, output: Tensor) -> Tensor:
        self.calls += 1
        return loss if self.calls < 5000 else loss.sqrt()


class Normalised(Writing):
    def written(self, loss: Tensor, output: Tensor) -> Tensor:
        self.first = self.first or loss.item()
        return loss / self.first


class Averaged(Writing):
    def written(self, loss: Tensor, output: Tensor) -> Tensor:
        self.average.lerp_(loss.detach(), 0.01)
        return loss / (1 + self.average)


class Long(Writing):
    def written(self, loss: Tensor, output: Tensor) -> Tensor:
        self.seen.append(loss.item())
        return loss if len(self.seen) < 500 else 2 * loss


class Flagged(Writing):
    def written(self, loss: Tensor, output: Tensor) -> Tensor:
        self.last = self.last + (output.detach().abs().max() > 1e6)
        return loss * (1 + self.last)


KINDS = [(Writing, ""), (Annealed, "calls"), (Normalised, "first"), (Averaged, "average"), (Long, "seen")]


@pytest.mark.parametrize(("kind", "name"), [*KINDS, (Flagged, "last")])
def test_what_calls_write_may_not_matter(kind: type[Writing], name: str) -> None:
    loss, given = kind(), ([nn.Linear(5, 5).double()], [random_batch(0, 4, 5)])
    if name:
        said = refused(*given, loss, mesh="pp=1")
        written = "something" if name == "average" else rf"the loss \({kind.__name__}\)\.{name}"
        assert re.search(rf"its calls write {written}, which it goes by", said)
    else:
        taken(*given, loss, mesh="pp=1")
        assert (loss.calls, len(loss.seen)) == (2, 2)


class Counting:
    """Counts its calls, and goes by the count once a loop says so; by then it is past its bound."""

    def __init__(self) -> None:
        self.epoch = self.calls = 0

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        loss = (output - targets).square().mean()
        return loss * min(1, self.calls / 3) if self.epoch else loss


class Collecting(nn.Module):
    """Collects a mean in training, and goes by it in evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0
        self.register_buffer("average", torch.ones((), dtype=torch.float64))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        loss = (output - targets).square().mean()
        if not self.epoch:
            self.average.lerp_(loss.detach(), 0.5)
            return loss
        return loss / self.average


@pytest.mark.parametrize("kind", [Counting, Collecting])
@pytest.mark.parametrize(("mesh", "microbatches"), [("pp=1", 4), ("dp=2", 1)])
def test_what_calls_have_written_may_not_matter_later_either(kind, mesh, microbatches):
    losses: dict[int, Any] = {}

    def loss_of(blocks: Any) -> Any:
        return losses.setdefault(id(blocks), kind())

    def change(blocks: Any, number: int) -> None:
        losses[id(blocks)].epoch = int(number == 4)

    x = torch.ones(4, 3, dtype=torch.float64)
    more = {"mesh": mesh, "microbatches": microbatches, "change": change, "loss_of": loss_of}
    said = refused([nn.Linear(3, 3).double()], [(x, 2 * x)] * 5, **more)
    assert re.search(r"has changed, its calls write .*, which it goes by", said)
