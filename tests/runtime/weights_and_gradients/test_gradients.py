"""Gradient buckets: their sizes, and that they are launched early and in one order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime.comm import DoneWork, Transport, run_local
from quintsched.runtime.engine import Engine
from quintsched.runtime.stage.build_stages import Stage
from quintsched.runtime.train.built_in_losses import cross_entropy_sum
from quintsched.runtime.weights_and_gradients import grad_buckets
from quintsched.runtime.weights_and_gradients.grad_buckets import GradBucket, PlanBucket, cut_buckets
from quintsched.runtime.weights_and_gradients.master_weights import Masters
from quintsched.runtime.weights_and_gradients.piggybacked_metrics import ROOM, Room, room_for

from ...helpers.training import check_equality
from ..toys import Task, sgd, share, tiny_vit


@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(10**9, 1), (4 * 20, 4), (1, 8)])
def test_buckets_hold_every_parameter_once_last_first(bucket_bytes: int, buckets: int) -> None:
    stage = Stage(0, {n: nn.Linear(4, 4) for n in range(4)})
    cut = cut_buckets(stage, 1, bucket_bytes)
    assert len(cut) == buckets
    held = [parameter for _, parameters in cut for parameter in parameters]
    assert [id(p) for p in held] == [id(p) for p in reversed(list(stage.parameters()))]


@pytest.mark.parametrize("is_small", [True, False])
def test_a_step_begins_with_nothing_and_what_no_gradient_comes_for_is_zero(
    is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grad_buckets, "IN_CACHE", 8 if is_small else 7)
    layer = nn.Linear(3, 2)
    bucket = GradBucket(PlanBucket(0, 0), list(layer.parameters()), Masters({}))
    assert bucket.begins_at_zero is is_small
    bucket.flat.fill_(torch.nan)
    bucket.attach()
    weight, view = layer.weight, bucket.views[0]
    assert weight.grad is (view if is_small else None)
    bucket.add_gradient(weight, view, torch.ones(2, 3))
    bucket.add_gradient(weight, view, torch.ones(2, 3))
    bucket.fill()
    bucket.give()
    assert bucket.flat.tolist() == [2.0] * 6 + [0.0] * 2
    assert layer.weight.grad is view
    assert layer.bias.grad is bucket.views[1]
    assert bucket.views[1].signbit().all()
    assert bucket.may_lack
    bucket.clear()
    bucket.attach()
    bucket.add_gradient(weight, view, torch.ones(2, 3).to_sparse())
    bucket.attach()  # as a further batch does whose gradients are added to these
    bucket.add_gradient(layer.bias, bucket.views[1], torch.full((2,), -0.0))
    bucket.fill()
    assert view.tolist() == [[1.0] * 3] * 2
    assert not bucket.views[1].signbit().any()
    assert not bucket.may_lack


def test_mixed_types_and_buckets_are_cut_apart() -> None:
    stage = Stage(0, {0: nn.Linear(4, 4), 1: nn.Linear(4, 4).double(), 2: nn.Linear(4, 4)})
    types = [parameters[0].dtype for _, parameters in cut_buckets(stage, 1, 10**9)]
    assert types == [torch.float32, torch.float64, torch.float32]
    assert {bucket for bucket, _ in cut_buckets(stage, 3, 10**9)} == {(0, 0), (0, 1), (0, 2)}


class Watched(nn.Linear):
    """Notes when its weight's gradient has arrived."""

    def __init__(self, notes: list[str], name: str) -> None:
        super().__init__(6, 6)
        self.weight.register_post_accumulate_grad_hook(lambda _: notes.append(f"{name} has its gradient"))


def test_buckets_are_launched_while_the_last_backward_runs() -> None:
    plan = qs.compile("1f1b", mesh="dp=2", microbatches=2)
    notes: list[list[str]] = [[], []]

    def run(transport: Transport) -> None:
        mine = notes[transport.rank]
        blocks = [Watched(mine, "first"), Watched(mine, "last")]
        engine = Engine(plan, blocks, nn.functional.mse_loss, sgd, bucket_mb=1e-6, transport=transport)
        engine.step(torch.randn(4, 6), torch.randn(4, 6))
        mine.clear()
        replicas = engine._groups.replicas
        reduce = replicas.all_reduce

        def noted(tensor: Tensor, *options: object) -> object:
            mine.append(f"launch {tensor.numel()}")
            return reduce(tensor)

        replicas.all_reduce = noted  # type: ignore[method-assign, assignment]
        engine.step(torch.randn(4, 6), torch.randn(4, 6))

    run_local(2, run)
    last = 36 + room_for(torch.float32)
    launched = ["launch 6", "launch 36", "launch 6", f"launch {last}"]
    assert [note for note in notes[0] if note.startswith("launch")] == launched
    assert notes[0] == notes[1]
    last_microbatch = notes[0][notes[0].index("launch 6") :]
    assert last_microbatch.index("launch 36") < last_microbatch.index("first has its gradient")


class Maybe(nn.Module):
    """Uses its second weight only where the first input is positive: gradients become ready in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta or x[0, 0] > 0:
            return self.b(self.a(x))  # type: ignore[no-any-return]
        return self.a(x)  # type: ignore[no-any-return]


def test_replicas_whose_gradients_come_in_different_orders_still_agree() -> None:
    plan = qs.compile("1f1b", mesh="dp=2", microbatches=1)
    inputs = torch.ones(2, 2, 6)
    inputs[1] *= -1

    def run(transport: Transport) -> dict[str, Tensor]:
        engine = Engine(plan, [Maybe, Maybe], nn.functional.mse_loss, sgd, bucket_mb=1e-6, transport=transport)
        engine.step(inputs[transport.rank], torch.zeros(2, 6))
        return engine.full_weights()

    first, second = run_local(2, run)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


def test_no_reduction_without_replicas() -> None:
    engine = Engine(qs.compile("1f1b", mesh="pp=1", microbatches=2), tiny_vit(), cross_entropy_sum, sgd)
    task = Task.make(1, 8, torch.float32)

    def refuse(tensor: Tensor) -> DoneWork:
        raise AssertionError("nothing is to be reduced")

    engine._groups.replicas.all_reduce = refuse  # type: ignore[method-assign, assignment]
    assert torch.isfinite(engine.step(*share(engine, task.inputs[0], task.targets[0])).loss)


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
