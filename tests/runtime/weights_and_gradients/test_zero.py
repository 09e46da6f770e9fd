"""ZeRO: what is sharded changes no number, and is resident only while it is used."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.blocks.block_builders import build_model
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.train.built_in_losses import cross_entropy_sum
from quintsched.runtime.weights_and_gradients.grad_buckets import GradBucket

from ...helpers.training import train_ranks
from ..parallel.lively import lively_gpt
from ..saving.gpt2_checkpoint import OPTIONS, draw_checkpoint, make_engine, write
from ..toys import adam, ids_task, share, worst_difference

DEPTH, LENGTH, SAMPLES = 4, 8, 8
COSTS = [1.0] * (DEPTH + 2)
STAGES = (1, 2, 3)


def engine_on(
    transport: Transport,
    plan: qs.Plan,
    optimizer: Callable[..., torch.optim.Optimizer] = adam,
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> Engine:
    return Engine(
        plan,
        lively_gpt(LENGTH),
        cross_entropy_sum,
        optimizer,
        clip=1.0,
        dtype=dtype,
        bucket_mb=0.01,
        block_costs=COSTS,
        transport=transport,
        **more,
    )


def compiled(zero: int, mesh: str = "dp=2,pp=2") -> qs.Plan:
    return qs.compile("1f1b", mesh=mesh, microbatches=2, zero=zero)


@pytest.mark.parametrize("zero", [0, 3, *(pytest.param(zero, marks=pytest.mark.slow) for zero in (1, 2))])
def test_a_step_that_is_not_finite_changes_nothing(zero: int) -> None:
    task = ids_task(2, SAMPLES, LENGTH)

    def overflowing(fails: list[bool], output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss, weight = cross_entropy_sum(output, targets)
        return (loss * math.inf if fails[0] else loss), weight

    def run(transport: Transport) -> None:
        fails = [False]
        engine = Engine(
            compiled(zero),
            lively_gpt(LENGTH),
            partial(overflowing, fails),
            adam,
            dtype=torch.float64,
            transport=transport,
        )
        engine.step(*share(engine, task.inputs[0], task.targets[0]))
        before = engine.full_weights()
        fails[0] = True
        assert engine.step(*share(engine, task.inputs[1], task.targets[1])).skipped
        assert all(torch.equal(weight, before[name]) for name, weight in engine.full_weights().items())
        fails[0] = False
        result = engine.step(*share(engine, task.inputs[1], task.targets[1]))
        assert not result.skipped
        assert math.isfinite(result.loss.item())
        assert any(not torch.equal(weight, before[name]) for name, weight in engine.full_weights().items())

    run_local(4, run)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("zero", STAGES)
def test_a_run_goes_on_bit_by_bit_from_its_state(zero: int, dtype: torch.dtype) -> None:
    task = ids_task(4, SAMPLES, LENGTH)

    def train(transport: Transport, engine: Engine, steps: range) -> list[float]:
        return [engine.step(*share(engine, task.inputs[n], task.targets[n])).loss.item() for n in steps]

    def run(transport: Transport) -> dict[str, Tensor]:
        first = engine_on(transport, compiled(zero), dtype=dtype)
        train(transport, first, range(2))
        state = {name: tensor.clone() for name, tensor in first.state_dict().items()}
        losses = train(transport, first, range(2, 4))
        second = engine_on(transport, compiled(zero), dtype=dtype)
        second.load_state_dict(state)
        assert train(transport, second, range(2, 4)) == losses
        ends, expected = second.full_weights(), first.full_weights()
        assert all(torch.equal(weight, expected[name]) for name, weight in ends.items())
        return state

    states = run_local(4, run)
    master = torch.float32 if dtype == torch.bfloat16 else dtype
    names = {name for state in states for name in state if name.startswith("model.")}
    for name in names:
        held = [state[name] for state in states if name in state]
        assert {part.dtype for part in held} == {master}
        assert all(part.dim() == 1 for part in held)
    own = [sum(state[name].numel() for name in names if name in state) for state in states]
    whole = sum(weight.numel() for weight in build_model(lively_gpt(LENGTH), 0, dtype).parameters())
    assert sum(own) == whole
    assert all(
        state[f"optimizer.{name.removeprefix('model.')}.exp_avg"].shape == state[name].shape
        for state in states
        for name in names
        if name in state
    )


def test_weights_and_gradients_are_resident_only_while_they_are_used() -> None:
    task = ids_task(1, SAMPLES, LENGTH)

    def run(transport: Transport) -> None:
        engine = engine_on(transport, compiled(3))
        before = engine.full_weights()
        engine.step(*share(engine, task.inputs[0], task.targets[0]))
        weights = [weight for stage in engine.stages.values() for weight in stage.parameters()]
        assert all(weight.isnan().all() and weight.grad is None for weight in weights)
        storages = {s.data_ptr(): s.nbytes() for s in map(torch.Tensor.untyped_storage, weights)}
        assert sum(storages.values()) == len(weights) * 8
        after = engine.full_weights()
        assert all(weight.isfinite().all() for weight in after.values())
        assert any(not torch.equal(weight, before[name]) for name, weight in after.items())

    run_local(4, run)


@pytest.mark.parametrize("zero", [2, 3])
def test_shards_of_gradients_are_resident_from_the_first_reduction_to_the_optimizer(zero: int) -> None:
    class Noting(torch.optim.SGD):
        needs_whole_parameters = False

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["note"]()
            super().step()

    def run(transport: Transport) -> None:
        buckets, seen = list[GradBucket](), list[list[bool]]()

        def note(*_: object) -> None:
            seen.append([bucket.shard.untyped_storage().nbytes() > 0 for bucket in buckets])

        plan = qs.compile("1f1b", mesh="dp=2", microbatches=3, zero=zero)
        engine = Engine(
            plan,
            [lambda: nn.Linear(8, 8)] * 2,
            nn.functional.mse_loss,
            partial(Noting, lr=0.1),
            transport=transport,
            bucket_mb=1e-4,
        )
        buckets += engine._state.gradients.reducer.of_stages([*engine.stages])
        (optimizer,) = engine.optimizers.values()
        optimizer.param_groups[0]["note"] = note
        layer = next(module for module in engine.stages[0].modules() if isinstance(module, nn.Linear))
        layer.register_forward_pre_hook(note)
        inputs, targets = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(transport.rank))
        for _ in range(2):
            engine.step(inputs, targets)
            note()
        first, _, third, optimizers, after = seen[-5:]
        assert len(buckets) == 4
        assert not any(first + after)
        assert all(third + optimizers)

    run_local(2, run)


def test_weights_that_are_gathered_and_freed_do_not_count_as_saved_by_autograd() -> None:
    task = ids_task(1, SAMPLES, LENGTH)

    def peak(zero: int) -> list[int]:
        def run(transport: Transport) -> int:
            engine = engine_on(transport, compiled(zero))
            return engine.step_counting_saved(*share(engine, task.inputs[0], task.targets[0]))[1].peak

        return run_local(4, run)

    assert peak(3) == peak(0)


def decaying(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    spared = [p for name, p in named_parameters if "bias" in name]
    others = [p for name, p in named_parameters if "bias" not in name]
    groups = [{"params": others}, {"params": spared, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01, weight_decay=0.5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("zero", STAGES)
def test_segments_go_by_the_names_of_their_parameters(zero: int) -> None:
    whole, shared = (
        train_ranks(
            compiled(stage, "dp=2"),
            lively_gpt(LENGTH),
            cross_entropy_sum,
            decaying,
            ids_task(2, SAMPLES, LENGTH).batches,
            clip=1.0,
            dtype=torch.float64,
            bucket_mb=0.01,
        )
        for stage in (0, zero)
    )
    assert worst_difference(shared, whole[0]) <= 1e-10


@pytest.mark.parametrize("zero", [2, 3])
def test_a_pretrained_checkpoint_is_loaded_whole(tmp_path: Path, zero: int) -> None:
    path, task = write(tmp_path, draw_checkpoint()), ids_task(1, SAMPLES, LENGTH)

    def run(plan: qs.Plan, transport: Transport) -> float:
        engine = make_engine(transport, plan, OPTIONS)
        engine.load_pretrained(path)
        return engine.step(*share(engine, task.inputs[0], task.targets[0])).loss.item()

    expected = run_local(1, partial(run, qs.compile("1f1b", mesh="dp=1", microbatches=4)))
    found = run_local(4, partial(run, compiled(zero)))
    assert found == pytest.approx(expected * 4, abs=1e-10)


@pytest.mark.parametrize("zero", STAGES)
def test_versions_of_weights_move_with_each_step(zero: int) -> None:
    def run(transport: Transport) -> list[int]:
        block = torch.nn.Linear(4, 4)
        plan = qs.compile("1f1b", mesh="dp=2", microbatches=1, zero=zero)
        engine = Engine(plan, [block], torch.nn.functional.mse_loss, torch.optim.SGD, transport=transport)
        versions = [block.weight._version]
        for _ in range(2):
            engine.step(torch.randn(2, 4), torch.randn(2, 4))
            versions.append(block.weight._version)
            assert block.weight.grad is None  # no rank has all of it
        return versions

    for versions in run_local(2, run):
        assert len(set(versions)) == 3
