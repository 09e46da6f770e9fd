"""Steps from graphs: the numbers of steps by instructions, whatever the host does between them, and what is refused.

The graphs are those of `captured`, on the CPU; `tests/gpu` asks the same of CUDA's.
"""

import os
import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime.data import DataSpec
from quintsched.runtime.engine import Engine
from quintsched.runtime.models.gpt import MoEGPTOptions, moe_gpt
from quintsched.runtime.train.built_in_losses import cross_entropy_sum
from tests.runtime.toys import ids_task, tiny_gpt

from .captured import LENGTH, SAMPLES, STEPS, OpTape, engine_of, require_same, tapes, trained, with_block

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({"schedule": name}, {}) for name in ("1f1b", "gpipe", "zb-h1")),
    *(({"schedule": name, "chunks": 2}, {}) for name in ("interleaved-1f1b", "interleaved-zb", "zbv")),
    ({"recompute": 1}, {}),
    *(({}, option) for option in ({"clip": 0.1}, {"clip": 1e6}, {"bucket_mb": 1e-3}, {"dtype": torch.bfloat16})),
]
"""Of the plan, and of the engine."""


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[OpTape]:
    return tapes(monkeypatch)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("asked", "options"), CASES, ids=str)
def test_steps_from_graphs_have_the_same_bits(asked: Any, options: Any, graphs: list[OpTape]) -> None:
    plan = qs.compile(**{"schedule": "1f1b"} | asked, mesh="pp=1", microbatches=4)
    require_same(lambda **more: engine_of(plan, **options, **more))
    assert len(graphs) == 1


def test_several_shapes_have_a_graph_each(graphs: list[OpTape]) -> None:
    def step(engine: Engine, number: int, inputs: Tensor, targets: Tensor) -> Any:
        samples = SAMPLES - number % 2
        return engine.step(inputs[:samples], targets[:samples])

    require_same(engine_of, step, steps=12)
    assert len(graphs) == 2


def test_buffers_that_forwards_change() -> None:
    engine, _ = require_same(lambda **more: engine_of(blocks=with_block(lambda: nn.BatchNorm1d(LENGTH)), **more))
    assert engine.full_weights()["2.num_batches_tracked"] == 4 * STEPS


class Calls(nn.Module):
    """Calls a function of itself and its input; has a scale, a weight without gradients, a buffer, and counts."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.calls, self.seen = function, 0, [0]
        self.scale, self.unused = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(30, 30))
        self.register_buffer("mean", torch.zeros(16, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def test_weights_without_gradients_stay() -> None:
    decaying = lambda parameters: torch.optim.AdamW(parameters, weight_decay=0.5)  # noqa: E731
    blocks = with_block(lambda: Calls(lambda self, x: x * self.scale))
    engine, _ = require_same(lambda **more: engine_of(blocks=blocks, optimizer=decaying, **more))
    assert torch.equal(engine.full_weights()["2.unused"], torch.ones(30, 30, dtype=torch.float64))


class First(nn.Module):
    """An embedding of ids that a function finds in what is given."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.embedding, self.function = tiny_gpt(LENGTH, depth=2)[0](), function

    def forward(self, given: Any) -> Tensor:
        return self.function(self.embedding, given)


def from_first(function: Any) -> Any:
    """Let engines have a first block that calls a function."""
    return lambda **more: engine_of(blocks=[lambda: First(function), *tiny_gpt(LENGTH, depth=2)[1:]], **more)


def test_a_step_that_is_not_finite_is_skipped() -> None:
    skipped: list[int] = []

    def step(engine: Engine, number: int, inputs: Tensor, targets: Tensor) -> Any:
        scale = torch.full((SAMPLES, 1, 1), torch.inf if number in (4, 6) else 1.0, dtype=torch.float64)
        result = engine.step({"ids": inputs, "scale": scale}, targets)
        skipped.extend([number] if result.skipped else [])
        return result

    require_same(from_first(lambda embedding, given: embedding(given["ids"]) * given["scale"]), step)
    assert skipped == [4, 6] * 2


MOE = MoEGPTOptions(hidden=16, depth=2, experts=4, capacity_factor=1.25, balance=0.01)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            lambda: {"blocks": moe_gpt(DataSpec(input_shape=(LENGTH,), num_classes=10), MOE)},
            "asks the device how many tokens go to each expert",
        ),
        (lambda: {"blocks": with_block(lambda: nn.Dropout(0.1))}, r"blocks draw random numbers \(dropout\)"),
        (
            lambda: {"plan": qs.compile("gpipe", mesh="pp=1", microbatches=4, offload=1)},
            "cuda_graph: no step of this plan can be captured: activations go to the host",
        ),
    ],
)
def test_what_cannot_be_captured_is_refused_at_the_start(made: Any, said: str) -> None:
    with pytest.raises(qs.UsageError, match=said):
        engine_of(cuda_graph=True, **made())


def test_a_block_that_asks_the_device() -> None:
    asks = lambda self, x: x * (1.0 if x.is_meta or x.sum().item() < 1e9 else 2.0)  # noqa: E731
    engine = engine_of(blocks=with_block(lambda: Calls(asks)), cuda_graph=True)
    with pytest.raises(qs.UsageError, match=r"step 3 cannot be captured: .*block 2 \(Calls\)"):
        trained(engine)


def counting(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x * (1 + 1e-3 * (self.calls > 20))


def listing(self: Any, x: Tensor) -> Tensor:
    self.seen.append(0)
    return x * (1 + 1e-3 * (len(self.seen) > 20))


def rebinding(self: Any, x: Tensor) -> Tensor:
    if not x.is_meta:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
    return x - self.mean


CHANGING: dict[str, Any] = {
    "number": lambda: Calls(counting),
    "list": lambda: Calls(listing),
    "buffer": lambda: Calls(rebinding),
    "noise": lambda: Calls(lambda self, x: x + torch.randn_like(x) if self.training else x),
    "draw": lambda: Calls(lambda self, x: x * 2 if random.random() < 0.02 else x * 1.0),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", CHANGING.values(), ids=CHANGING)
def test_what_each_forward_changes_is_never_captured(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fresh(**more: Any) -> Engine:
        random.seed(0)
        return engine_of(blocks=with_block(make), **more)

    require_same(fresh, steps=20)
    assert "a step runs by its instructions" in caplog.text


class Slotted:
    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = 1.0


class Shadowed(nn.LeakyReLU):
    rate = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.rate


class Holding(nn.Module):
    """A block that goes by what is set between steps, on it and on what others hold for it."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.table, self.drop = 1.0, torch.ones(16, dtype=torch.float64), nn.Dropout(0.0)
        self.act: nn.Module = nn.Tanh()
        self.shadowed = Shadowed()
        self.slotted, self.config = Slotted(), SimpleNamespace(rate=1.0)
        self.rates: Any = deque([1.0], maxlen=1)
        self.teacher = [nn.Linear(16, 16, dtype=torch.float64).requires_grad_(False)]
        self.random, self.scale = np.random.RandomState(0), nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        rate = self.slotted.rate * self.config.rate * self.rates[0] * self.factor
        return self.shadowed(self.act(self.drop(x))) * rate * self.table * self.scale + self.teacher[0](x).detach()


SET: dict[str, Any] = {
    "number": lambda block, step: setattr(block, "factor", 1.0 + 0.1 * step),
    "tensor": lambda block, step: setattr(block, "table", torch.full((16,), 1.0 + 0.1 * step, dtype=torch.float64)),
    "rate of a dropout": lambda block, step: setattr(block.drop, "p", 0.5 if step == 7 else 0.0),
    "hook": lambda block, step: block.drop.register_forward_hook(lambda module, given, made: made * 1.1),
    "hook on a gradient": lambda block, step: block.scale.register_hook(lambda gradient: gradient * 0.5),
    "module": lambda block, step: setattr(block, "act", nn.Sigmoid()),
    "default of a class": lambda block, step: setattr(block.shadowed, "rate", 2.0),
    "constant of torch's": lambda block, step: setattr(block.shadowed, "negative_slope", 0.5),
    "slot": lambda block, step: setattr(block.slotted, "rate", 2.0),
    "namespace": lambda block, step: setattr(block.config, "rate", 2.0),
    "full deque": lambda block, step: block.rates.append(1.0 + 0.1 * step),
    "memory of a weight": lambda block, step: setattr(block.scale, "data", block.scale.data.clone()),
    "what is trained": lambda block, step: block.scale.requires_grad_(step > 7),
    "weight of a teacher": lambda block, step: setattr(block.teacher[0].weight, "data", torch.eye(16).double()),
    "forward": lambda block, step: setattr(block.act, "forward", lambda x: x * 2),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("change", SET.values(), ids=SET)
def test_what_is_set_between_steps_counts_from_then_on(change: Any) -> None:
    def step(engine: Engine, number: int, inputs: Tensor, targets: Tensor) -> Any:
        if number in (7, 11):
            change(engine.stages[0].blocks["2"], number)
        return engine.step(inputs, targets)

    require_same(lambda **more: engine_of(blocks=with_block(Holding), **more), step, steps=14)


def test_what_nobody_sees_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(engine: Engine, number: int, inputs: Tensor, targets: Tensor) -> Any:
        monkeypatch.setenv("FACTOR", str(1 + 0.01 * (number > 9)))
        return engine.step(inputs, targets)

    monkeypatch.setenv("FACTOR", "1")
    blocks = with_block(lambda: Calls(lambda self, x: x * float(os.environ["FACTOR"])))
    with pytest.raises(qs.UsageError, match=r"differs from the same step by its instructions.*Go back to a checkpoint"):
        trained(engine_of(blocks=blocks, cuda_graph=True), step, steps=104)


@pytest.mark.slow
def test_what_comes_between_steps_does_not_hinder_them() -> None:
    def step(engine: Engine, number: int, inputs: Tensor, targets: Tensor) -> Any:
        if number == 5:
            for optimizer in engine.optimizers.values():
                optimizer.param_groups[0]["lr"] = 0.01
        if number == 6:
            engine.step(inputs, targets, last=False)
        if number == 7:
            engine.evaluate(inputs, targets)
        return engine.step(inputs, targets, microbatches=2 if number == 8 else None)

    require_same(engine_of, step, steps=14)


@pytest.mark.slow
def test_a_batch_that_is_changed_in_place(caplog: pytest.LogCaptureFixture) -> None:
    require_same(from_first(lambda embedding, ids: embedding(ids if ids.is_meta else ids.remainder_(7))))
    assert "a block changes the batch in place" in caplog.text


@pytest.mark.slow
def test_autocast_counts_where_it_is_entered() -> None:
    def step(engine: Engine, number: int, inputs: Tensor, targets: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=number % 4 == 0):
            return engine.step(inputs, targets)

    require_same(lambda **more: engine_of(dtype=torch.float32, **more), step, steps=16)


@pytest.mark.slow
def test_statistics_of_a_loss_are_those_of_each_step_once() -> None:
    """A batch norm in a loss, and one on plain tensors, which leaves no trace in their versions."""
    found = []
    for is_captured in (True, False):
        norm, mean, var = nn.BatchNorm1d(LENGTH).double(), torch.zeros(LENGTH).double(), torch.ones(LENGTH).double()

        def loss_fn(logits: Tensor, targets: Tensor, norm: Any = norm, mean: Tensor = mean, var: Tensor = var) -> Any:
            return cross_entropy_sum(nn.functional.batch_norm(norm(logits), mean, var, training=True), targets)

        figures, _ = trained(engine_of(loss_fn=loss_fn, loss_over="microbatch", cuda_graph=is_captured))
        found.append([*figures, mean, var, *norm.buffers()])
    assert all(map(torch.equal, *found))


class Owner:
    """Trainer as users write them: it has an engine, counts its steps, and its loss is a method of it."""

    def __init__(self, **more: Any) -> None:
        self.alpha, self.number, self.log = 0.1, 0, list[float]()
        self.seen = torch.zeros(10, dtype=torch.int64)
        self.engine = engine_of(loss_fn=self.loss, metrics={"seen": self.count}, **more)

    def loss(self, logits: Tensor, targets: Tensor) -> Any:
        total, weight = cross_entropy_sum(logits, targets)
        return total * (1 + self.alpha), weight

    def count(self, logits: Tensor, targets: Tensor) -> Tensor:
        self.seen += torch.zeros_like(self.seen).scatter_add(
            0, targets.clamp(min=0).flatten(), torch.ones_like(targets).flatten()
        )
        return (targets >= 0).sum()

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.number += 1
        if self.number % 4 == 0:
            self.alpha += 0.01
        self.log.append(self.engine.step(inputs, targets).loss.item())
        return self.seen.clone()


@pytest.mark.slow
def test_a_loss_that_is_a_method_of_a_trainer(graphs: list[OpTape]) -> None:
    task, found = ids_task(10, SAMPLES, LENGTH), []
    for is_captured in (True, False):
        owner = Owner(cuda_graph=is_captured)
        counts = [owner.step(*batch) for batch in zip(task.inputs, task.targets, strict=True)]
        found.append((owner.log, counts))
    (log, counts), (expected, others) = found
    assert log == expected
    assert all(map(torch.equal, counts, others)), "tensors that a metric changes in place"
    assert len(graphs) >= 2, "captured anew for each of its rates"
