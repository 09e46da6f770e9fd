"""Losses on several stages: their sum, and the gradients, are those of one process; where stages lie changes no bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Carry, Engine
from quintsched.runtime.blocks.block_outlines import build_block, split_result
from quintsched.runtime.comm import Transport, run_local

from ..toys import difference, sgd

SIZE, CLASSES, SAMPLES, STEPS = 6, 5, 12, 2

Outcome = tuple[list[float], dict[str, Tensor], bool]


def summed(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross entropy, and how many samples count."""
    return nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"), (targets >= 0).sum()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Exit(nn.Module):
    """An early exit: a head of its own, and its loss beside what goes on."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.head = nn.Linear(SIZE, CLASSES)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return x, summed(self.head(x), targets)[0] * self.share


class Sends(Layer):
    def forward(self, x: Tensor) -> Carry:  # type: ignore[override]
        y = torch.tanh(self.layer(x))
        return Carry(y, early=y)


class Takes(nn.Module):
    """The last head, which looks at an early output as well."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(SIZE, CLASSES)

    def forward(self, x: Tensor, early: Tensor) -> Tensor:
        out: Tensor = self.head(x + early)
        return out


def blocks() -> list[Any]:
    """Two blocks for each of four stages, or four for each of two; exits on stages 1 and 2, or on both."""
    return [Sends, Layer, Layer, partial(Exit, 0.3), partial(Exit, 0.7), Layer, Layer, Takes]


def data() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, SIZE, generator=random, dtype=torch.float64)
    targets = torch.randint(0, CLASSES, (SAMPLES,), generator=random)
    targets[4] = -100
    return inputs, targets


def train(plan: qs.Plan, model: Sequence[Any], **more: Any) -> list[Outcome]:
    inputs, targets = data()

    def run(transport: Transport) -> Outcome:
        costs = [1.0] * len(model)
        engine = Engine(plan, model, summed, sgd, dtype=torch.float64, transport=transport, block_costs=costs, **more)
        given = inputs.chunk(engine.num_replicas)[engine.replica] if engine.needs_inputs else None
        wanted = targets.chunk(engine.num_replicas)[engine.replica] if engine.needs_targets else None
        losses = [float(engine.step(given, wanted).loss) for _ in range(STEPS)]
        losses.append(float(engine.evaluate(given, wanted).loss))
        return losses, engine.full_weights(), engine.needs_targets

    return run_local(plan.mesh.size, run)


def train_plainly() -> tuple[list[float], dict[str, Tensor]]:
    """The same network in one loop that owes nothing to the engine."""
    inputs, targets = data()
    model = nn.ModuleList(build_block(block, number, 0, torch.float64) for number, block in enumerate(blocks()))
    optimizer = sgd(list(model.parameters()))

    def loss_of() -> Tensor:
        x, early, total = inputs, None, torch.zeros((), dtype=torch.float64)
        for block in model:
            extra = (
                {"targets": targets}
                if isinstance(block, Exit)
                else {"early": early}
                if isinstance(block, Takes)
                else {}
            )
            x, fresh, loss = split_result(block(x, **extra))
            early = fresh.get("early", early)
            total = total if loss is None else total + loss
        last, weight = summed(x, targets)
        return (total + last) / weight

    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return [*losses, float(loss_of().detach())], {name: p.detach() for name, p in model.named_parameters()}


FOUR: dict[str, Any] = {"losses": (1, 2, 3), "skip": {"early": (0, 3)}}
TWO: dict[str, Any] = {"losses": (0, 1), "skip": {"early": (0, 1)}}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("1f1b", {"mesh": "pp=4", **FOUR}),
        ("gpipe", {"mesh": "pp=4", **FOUR, "recompute": 1}),
        ("zb-h1", {"mesh": "pp=4", **FOUR, "skip": {}}),
        ("interleaved-1f1b", {"mesh": "pp=2", **FOUR}),
        ("zbv", {"mesh": "pp=2", **FOUR, "recompute": (0, 2, 1, 0)}),
        ("1f1b", {"mesh": "pp=2", **TWO}),
        ("1f1b", {"mesh": "dp=2,pp=4", **FOUR, "zero": 3}),
        ("zbv", {"mesh": "dp=2,pp=2", **FOUR}),
        ("1f1b", {"mesh": "pp=2,tp=2", **TWO}),
        ("1f1b", {"mesh": "pp=1"}),
    ],
)
def test_losses_on_several_stages_equal_one_process(name: str, shape: dict[str, Any]) -> None:
    plan = qs.compile(name, microbatches=6, **shape)
    expected, weights = train_plainly()
    for losses, found, _ in train(plan, blocks()):
        assert losses == pytest.approx(expected, abs=1e-12)
        assert all(difference(weight, weights[name]) <= 1e-12 for name, weight in found.items())


def test_the_loss_has_the_same_bits_on_every_mesh_and_in_every_order() -> None:
    """Compare the first step only: gradients are added up in the order of backwards, which is the schedule's."""
    shapes = [
        ("1f1b", {"mesh": "pp=4", **FOUR}),
        ("gpipe", {"mesh": "pp=4", **FOUR}),
        ("zbv", {"mesh": "pp=2", **FOUR}),
        ("v-min", {"mesh": "pp=2", **FOUR, "skip": {}}),
        ("interleaved-1f1b", {"mesh": "pp=2", **FOUR}),
        ("dualpipe-v", {"mesh": "pp=2", **FOUR}),
    ]
    found = {
        losses[0] for name, shape in shapes for losses, *_ in train(qs.compile(name, microbatches=6, **shape), blocks())
    }
    assert len(found) == 1


def test_ranks_with_a_loss_need_targets() -> None:
    plan = qs.compile("1f1b", mesh="pp=4", microbatches=2, **FOUR)
    assert [needs for *_, needs in train(plan, blocks())] == [False, True, True, True]
    assert [stage for program in plan.programs for stage in program[-1].stages] == [0, 1, 2, 3]


def test_a_block_that_takes_targets_where_the_plan_has_no_loss_is_refused() -> None:
    with pytest.raises(qs.MisfitError, match="no loss there: compile it with --losses 1,2,3"):
        train(qs.compile("1f1b", mesh="pp=4", microbatches=2), blocks())


def test_a_planned_loss_that_no_block_returns_is_refused() -> None:
    with pytest.raises(qs.MisfitError, match="a loss on stage 0, but none of its 2 blocks returns one"):
        train(qs.compile("1f1b", mesh="pp=4", microbatches=2, losses=(0, 1, 2, 3)), blocks())


def test_nobody_sends_targets_along() -> None:
    class Wrong(Layer):
        def forward(self, x: Tensor) -> Carry:  # type: ignore[override]
            return Carry(x, targets=x)

    with pytest.raises(qs.MisfitError, match="block 0 sends 'targets' along, but there is something else of that name"):
        train(qs.compile("1f1b", mesh="pp=1", microbatches=1), [Wrong, Layer])
