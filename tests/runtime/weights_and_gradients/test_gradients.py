"""Gradient buckets and their flat buffers: sizes, one collective, memory that a loop replaces."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import quintsched as qs
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.engine import Engine
from quintsched.runtime.stage.build_stages import Stage
from quintsched.runtime.weights_and_gradients import grad_buckets
from quintsched.runtime.weights_and_gradients.flat_buffer import ALIGNMENT, FlatLayout
from quintsched.runtime.weights_and_gradients.grad_buckets import cut_buckets
from quintsched.runtime.weights_and_gradients.piggybacked_metrics import ROOM, Room, room_for

from ...helpers.training import check_equality
from ..toys import sgd


@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(10**9, 1), (4 * 20, 4), (1, 8)])
def test_buckets_hold_every_parameter_once_last_first(bucket_bytes: int, buckets: int) -> None:
    stage = Stage(0, {n: nn.Linear(4, 4) for n in range(4)})
    cut = cut_buckets(stage, 1, bucket_bytes)
    assert len(cut) == buckets
    held = [parameter for _, parameters in cut for parameter in parameters]
    assert [id(p) for p in held] == [id(p) for p in reversed(list(stage.parameters()))]


def test_a_step_of_replicas_is_one_collective() -> None:
    plan = qs.compile("1f1b", mesh="dp=2", microbatches=2)
    counts = [0, 0]

    def run(transport: Transport) -> float:
        engine = Engine(plan, [lambda: nn.Linear(6, 6)], nn.functional.mse_loss, sgd, transport=transport)
        for group in (engine._groups.replicas, engine._groups.metrics):
            group.all_reduce = partial(counted, transport.rank, group.all_reduce)  # type: ignore[method-assign]
        engine.step(torch.ones(4, 6), torch.zeros(4, 6))
        counts[transport.rank] = 0
        return engine.step(torch.ones(4, 6), torch.zeros(4, 6)).loss.item()

    def counted(rank: int, reduce: Callable[..., object], *given: object) -> object:
        counts[rank] += 1
        return reduce(*given)

    first, second = run_local(2, run)
    assert first == second
    assert counts == [1, 1]


@pytest.mark.parametrize("is_small", [True, False])
def test_modules_may_be_moved_between_steps_which_gives_gradients_other_memory(
    is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grad_buckets, "IN_CACHE", 10**6 if is_small else 1)

    def losses(*, moves: bool) -> list[float]:
        layer = nn.Linear(4, 4)
        layer.load_state_dict({"weight": torch.eye(4), "bias": torch.ones(4)})
        engine = Engine(qs.compile("1f1b", mesh="dp=1", microbatches=2), [layer], nn.functional.mse_loss, sgd)
        found = []
        for _ in range(4):
            found.append(float(engine.step(torch.ones(4, 4), torch.zeros(4, 4)).loss))
            if moves:
                layer.double().float()
        return found

    assert losses(moves=True) == losses(moves=False)


def test_a_backward_of_the_loop_between_steps_is_the_loop_s_alone() -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    twin = copy.deepcopy(layers[0])
    engine = Engine(qs.compile("1f1b", mesh="dp=1", microbatches=2), layers, nn.functional.mse_loss, sgd)
    for _ in range(2):
        engine.step(torch.ones(4, 4), torch.zeros(4, 4))
        twin.load_state_dict(layers[0].state_dict())
        for layer in (layers[0], twin):
            layer.zero_grad()
            layer(torch.ones(2, 4)).square().sum().backward()
        assert torch.equal(layers[0].weight.grad, twin.weight.grad)  # type: ignore[arg-type]
    engine.step(torch.ones(4, 4), torch.zeros(4, 4))
    nn.utils.clip_grad_norm_(layers[0].parameters(), 1e-3)
    with pytest.raises(qs.UsageError, match=r"gradients were changed since the last engine.step.*Engine\(…, clip=…\)"):
        engine.step(torch.ones(4, 4), torch.zeros(4, 4))


def halve(model: nn.Module, step: int) -> None:
    halved = nn.utils.parameters_to_vector(model.parameters()).detach() / 2
    nn.utils.vector_to_parameters(halved, model.parameters())


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_weights_may_be_given_other_memory_between_steps(zero: int) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), torch.eye(4, dtype=torch.float64)
    plan = qs.compile("1f1b", mesh="dp=2", microbatches=1, zero=zero)
    check_equality(plan, model, nn.functional.mse_loss, sgd, [(x, x + 1)] * 3, after=halve, cut=list)


SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=5)


@given(SHAPES, st.integers(1, 5))
def test_the_segments_of_all_shards_are_the_parameters(shapes: list[list[int]], num_shards: int) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    layouts = [FlatLayout.sharded(tensors, num_shards, index) for index in range(num_shards)]
    assert all(start % ALIGNMENT == 0 for start in layouts[0].starts)
    flat = torch.zeros(layouts[0].size)
    for view, tensor in zip(layouts[0].views(flat), tensors, strict=True):
        view.copy_(tensor)
    found = [torch.full((tensor.numel(),), torch.nan) for tensor in tensors]
    owners = [0] * len(tensors)
    for layout in layouts:
        shard = layout.shard(flat)
        owners = [count + (segment is not None) for count, segment in zip(owners, layout.segments(), strict=True)]
        assert shard.shape == (layout.shard_size,)
        for numbers, segment in zip(found, layout.segments(), strict=True):
            if segment is not None:
                assert numbers[segment.start : segment.stop].isnan().all(), "two shards hold the same number"
                numbers[segment.start : segment.stop] = segment.view_of(shard)
    assert all(torch.equal(numbers, tensor.flatten()) for numbers, tensor in zip(found, tensors, strict=True))
    assert all(owners), "a parameter without numbers has an owner, which saves it"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_figures_that_ride_along_are_added_up_to_the_last_bit(dtype: torch.dtype) -> None:
    figures = torch.randn(ROOM, dtype=torch.float64) * 10.0 ** torch.arange(-20, 20).repeat(5)[:ROOM]
    figures[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    others = torch.zeros(ROOM, dtype=torch.float64)
    memories = torch.full((2, room_for(dtype)), torch.nan, dtype=dtype)
    for memory, brought in zip(memories, (figures, others), strict=True):
        Room(memory).board(brought)
    total = memories.sum(0)
    room = Room(memories[0])
    memories[0].copy_(total)
    assert torch.equal(room.alight(ROOM)[3:], figures[3:])
    assert not room.alight(3).isfinite().any()
