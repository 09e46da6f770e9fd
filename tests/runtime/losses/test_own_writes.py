"""Side effects of a loss may not affect its value; what its trial runs write, and engines meanwhile, stays apart."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ...helpers.training import random_batch
from ..trials import refused, taken


class Writing(nn.Module):
    """A mean of squares, of which a function makes the loss; it may write what the module has for it."""

    def __init__(self, written: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.calls, self.first, self.mask, self.seen, self.last = 0, None, None, list[float](), torch.zeros(())
        self.register_buffer("average", torch.zeros((), dtype=torch.float64))
        self.written = written

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        return self.written(self, nn.functional.mse_loss(output, targets), output)


def write_all(own: Any, loss: Tensor, output: Tensor) -> Tensor:
    own.calls += 1
    own.seen.append(loss.item())
    own.last = loss.detach()
    if own.mask is None or own.mask.shape != output.shape[1:]:
        own.mask = torch.ones(output.shape[1:], dtype=output.dtype)
    return loss + 0 * (output * own.mask).mean()


def is_far(output: Tensor) -> Tensor:
    return output.detach().abs().max() > 1e6


GOING: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "": write_all,
    "calls": lambda own, loss, _: (setattr(own, "calls", own.calls + 1), loss.sqrt() if own.calls > 5000 else loss)[1],
    "first": lambda own, loss, _: (setattr(own, "first", own.first or loss.item()), loss / own.first)[1],
    "average": lambda own, loss, _: loss / (1 + own.average.lerp_(loss.detach(), 0.01)),
    "seen": lambda own, loss, _: (own.seen.append(loss.item()), loss if len(own.seen) < 500 else 2 * loss)[1],
    "last": lambda own, loss, output: (setattr(own, "last", own.last + is_far(output)), loss * (1 + own.last))[1],
}
"""Losses by what they go by that their calls write."""


@pytest.mark.parametrize("name", GOING)
def test_what_calls_write_may_not_matter(name: str) -> None:
    loss, given = Writing(GOING[name]), ([nn.Linear(5, 5).double()], [random_batch(0, 4, 5)])
    if name:
        said = refused(*given, loss, mesh="pp=1")
        written = "something" if name == "average" else rf"the loss \(Writing\)\.{name}"
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
