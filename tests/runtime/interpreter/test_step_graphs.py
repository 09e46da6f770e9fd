"""Steps from graphs: the numbers of steps by instructions, whatever the host does between them, and what is refused.

The graphs are those of `op_tape`, on the CPU; `tests/gpu` asks the same of CUDA's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.errors import MisfitError, UsageError
from quintsched.runtime.data import DataSpec
from quintsched.runtime.engine import Engine
from quintsched.runtime.models.gpt import MoEGPTOptions, moe_gpt
from tests.runtime.toys import ids_task, tiny_gpt

from .captured import LENGTH, SAMPLES, STEPS, engine_of, require_same, tapes, trained, with_block
from .op_tape import OpTape

SCHEDULES = [("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("interleaved-zb", 2), ("zbv", 2)]


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[OpTape]:
    return tapes(monkeypatch)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_steps_from_graphs_have_the_same_bits(schedule: str, chunks: int, graphs: list[OpTape]) -> None:
    plan = qs.compile(schedule, mesh="pp=1", microbatches=4, chunks=chunks)
    require_same(lambda **more: engine_of(plan, **more))
    assert len(graphs) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "option", [{"clip": 0.1}, {"clip": 1e6}, {"bucket_mb": 1e-3}, {"dtype": torch.bfloat16}, {"recompute": 1}], ids=str
)
def test_options(option: dict[str, Any]) -> None:
    settings = {name: value for name, value in option.items() if name != "recompute"}
    plan = qs.compile("1f1b", mesh="pp=1", microbatches=4, recompute=option.get("recompute", 0))
    require_same(lambda **more: engine_of(plan, **settings, **more))


def test_several_shapes_have_a_graph_each(graphs: list[OpTape]) -> None:
    def step(engine: Engine, number: int, inputs: Tensor, targets: Tensor) -> Any:
        samples = SAMPLES - number % 2
        return engine.step(inputs[:samples], targets[:samples])

    require_same(engine_of, step, steps=12)
    assert len(graphs) == 2


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


def test_a_weight_that_is_frozen_or_moved_is_seen(graphs: list[OpTape]) -> None:
    def step(engine: Engine, number: int, inputs: Tensor, targets: Tensor) -> Any:
        stage = engine.stages[0]
        if number == 5:
            next(iter(stage.blocks["1"].parameters())).data = next(iter(stage.blocks["1"].parameters())).data.clone()
        if number == 8:
            next(iter(stage.blocks["2"].parameters())).requires_grad_(False)
        return engine.step(inputs, targets)

    require_same(engine_of, step, steps=14)
    assert len(graphs) == 3


class Averaging(nn.Module):
    """A block with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_buffers_that_forwards_change() -> None:
    engine, _ = require_same(lambda **more: engine_of(blocks=with_block(Averaging), **more))
    assert engine.full_weights()["2.norm.num_batches_tracked"] == 4 * STEPS


class Unused(nn.Module):
    """A block of which a weight has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(300, 300))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.used


def test_weights_without_gradients_stay() -> None:
    decaying = lambda parameters: torch.optim.AdamW(parameters, weight_decay=0.5)  # noqa: E731
    engine, _ = require_same(lambda **more: engine_of(blocks=with_block(Unused), optimizer=decaying, **more))
    assert torch.equal(engine.full_weights()["2.unused"], torch.ones(300, 300, dtype=torch.float64))


class Scaled(nn.Module):
    """An embedding that is given a scale beside its ids."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return self.embedding(given["ids"]) * given["scale"]


def test_a_step_that_is_not_finite_is_skipped() -> None:
    skipped: list[int] = []

    def step(engine: Engine, number: int, inputs: Tensor, targets: Tensor) -> Any:
        scale = torch.full((SAMPLES, 1, 1), torch.inf if number in (4, 6) else 1.0, dtype=torch.float64)
        result = engine.step({"ids": inputs, "scale": scale}, targets)
        skipped.extend([number] if result.skipped else [])
        return result

    first, *rest = tiny_gpt(LENGTH, depth=2)
    require_same(lambda **more: engine_of(blocks=[lambda: Scaled(first()), *rest], **more), step)
    assert skipped == [4, 6] * 2


def test_a_stop_that_is_asked_for_is_seen_once() -> None:
    asked = 6
    answers: list[bool] = []
    engine = engine_of(cuda_graph=True, wants_stop=lambda: bool(answers) and answers.pop())
    task = ids_task(STEPS, SAMPLES, LENGTH)
    for number, batch in enumerate(zip(task.inputs, task.targets, strict=True)):
        answers += [True] if number == asked else []
        assert engine.step(*batch).stop_asked is (number == asked)


def moe_blocks(*, pads: bool) -> Any:
    data = DataSpec(input_shape=(LENGTH,), num_classes=10)
    options = {"hidden": 16, "depth": 2, "experts": 4, "capacity_factor": 1.25, "balance": 0.01}
    return moe_gpt(data, MoEGPTOptions(**options, pad_to_capacity=pads))


def test_experts_that_pad() -> None:
    engines = require_same(lambda **more: engine_of(blocks=moe_blocks(pads=True), **more))
    mine, theirs = (engine.expert_tokens() for engine in engines)
    assert all(torch.equal(count, theirs[name]) for name, count in mine.items())


def test_losses_that_are_means() -> None:
    classes = torch.linspace(0.5, 2.0, 10, dtype=torch.float64)
    for more in ({}, {"weight": classes}):

        def loss(logits: Tensor, targets: Tensor, more: Any = more) -> Tensor:
            return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), **more)

        require_same(partial(engine_of, loss_fn=loss))


# What is refused.


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: {"blocks": moe_blocks(pads=False)}, "asks the device how many tokens go to each expert"),
        (lambda: {"blocks": with_block(lambda: nn.Dropout(0.1))}, r"blocks draw random numbers \(dropout\)"),
        (
            lambda: {"plan": qs.compile("gpipe", mesh="pp=1", microbatches=4, offload=1)},
            "cuda_graph: no step of this plan can be captured: activations go to the host",
        ),
    ],
)
def test_what_cannot_be_captured_is_refused_at_the_start(made: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        engine_of(cuda_graph=True, **made())


def test_a_device_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(MisfitError, match="cuda_graph wants a CUDA device, and this run is on cpu"):
        engine_of(cuda_graph=True)


class Asking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (2.0 if x.sum().item() > 1e9 else 1.0) if not x.is_meta else x * 1.0


def test_a_block_that_asks_the_device() -> None:
    engine = engine_of(blocks=with_block(Asking), cuda_graph=True)
    with pytest.raises(UsageError, match=r"step 3 cannot be captured: .*block 2 \(Asking\)"):
        trained(engine)
