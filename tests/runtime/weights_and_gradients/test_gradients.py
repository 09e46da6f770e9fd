"""Gradient buckets and their flat buffers: sizes, one collective, memory that a loop replaces."""

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine, ForwardEngine, Transport, run_local
from quintsched.runtime.weights_and_gradients import grad_buckets
from quintsched.runtime.weights_and_gradients.losses_in_gradient_buckets import ROOM, Room, room_for

from ...helpers.training import check_equality
from .. import trials
from ..linear_blocks import batch, linear, squared_sum
from ..toys import sgd


def test_a_step_of_replicas_is_one_collective() -> None:
    def work(engine: Engine) -> tuple[float, int]:
        calls: list[object] = []

        def counted(reduce: Callable[..., object], *given: object) -> object:
            calls.append(given)
            return reduce(*given)

        for group in (engine._groups.replicas, engine._groups.metrics):
            group.all_reduce = partial(counted, group.all_reduce)  # type: ignore[method-assign]
        engine.step(torch.ones(4, 6), torch.zeros(4, 6))
        calls.clear()
        return engine.step(torch.ones(4, 6), torch.zeros(4, 6)).loss.item(), len(calls)

    (first, calls), second = trials.on_ranks(work, [linear], mesh="dp=2")
    assert (first, calls) == (first, 1) == second


def test_a_backward_of_the_loop_between_steps_is_the_loop_s_alone() -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    twin = copy.deepcopy(layers[0])
    engine = trials.engine_of(None, layers, mesh="dp=1")
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


def move(model: nn.Module, step: int) -> None:
    for block in model:  # type: ignore[attr-defined]
        block.float().double()


@pytest.mark.parametrize("in_cache", [1, 10**6])
@pytest.mark.parametrize(("change", "zero"), [(halve, 0), (halve, 1), (halve, 2), (move, 0)])
def test_weights_and_gradients_may_be_given_other_memory_between_steps(change, zero, in_cache, monkeypatch):
    monkeypatch.setattr(grad_buckets, "IN_CACHE", in_cache)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), torch.eye(4, dtype=torch.float64)
    plan = qs.compile("1f1b", mesh="dp=2", microbatches=1, zero=zero)
    check_equality(plan, model, nn.functional.mse_loss, sgd, [(x, x + 1)] * 3, after=change, cut=list)


WIDTHS = [8, 300]
"""Of buckets that begin at zero, and of larger ones, whose first gradient is copied."""
DTYPES = [torch.float32, torch.bfloat16]


class Clearing(nn.Linear):
    """A layer whose forward frees gradients, as a training loop does."""

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.parameters():
            parameter.grad = None
        return super().forward(x)


def engine_of(
    width: int, *, dtype: torch.dtype = torch.float32, kind: type[nn.Linear] = nn.Linear, **of: Any
) -> Engine:
    plan = qs.compile(**{"schedule": "1f1b", "mesh": "pp=1", "microbatches": 4} | of)
    blocks = [lambda: nn.Linear(8, width), lambda: kind(width, width), lambda: nn.Linear(width, 4)]
    return Engine(plan, blocks, nn.functional.mse_loss, sgd, dtype=dtype, seed=0)


def norms(engine: Engine, steps: int = 4, before: Callable[[int], object] = lambda step: None) -> list[float]:
    random = torch.Generator().manual_seed(0)
    dtype, found = next(engine.stages[0].parameters()).dtype, []
    for step in range(steps):
        before(step)
        inputs, targets = torch.randn(2, 8, 8, generator=random).to(dtype)
        found.append(engine.step(inputs, targets[:, :4]).grad_norm.item())
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("plan", [{"schedule": "gpipe"}, {"schedule": "zb-h1"}], ids=str)
def test_gradients_that_a_forward_frees_are_kept(plan: dict[str, Any], width: int, dtype: torch.dtype) -> None:
    assert norms(engine_of(width, dtype=dtype, kind=Clearing, **plan)) == norms(engine_of(width, dtype=dtype, **plan))


def free(parameter: Tensor) -> None:
    parameter.grad = None


def clone(parameter: Tensor) -> None:
    parameter.grad = parameter.grad.clone()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("hook", "said"), [(free, "has lost its gradient"), (clone, "replaces its .grad")])
def test_a_hook_that_takes_a_sum_away_is_refused(hook: Callable[[Tensor], None], said: str, width: int) -> None:
    engine = engine_of(width)

    def hang_on(step: int) -> None:
        if step == 1:
            for parameter in engine.stages[0].parameters():
                parameter.register_post_accumulate_grad_hook(hook)

    with pytest.raises(qs.MisfitError, match=said):
        norms(engine, before=hang_on)


def of_output_and_weights(layers: Any) -> Callable[[Tensor, Tensor], tuple[Tensor, float]]:
    def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, float]:
        biases = sum(layer.bias.float().square().sum() for layer in layers)
        return (output - targets).float().square().sum() + 0.05 * len(output) * biases, float(len(output))

    return loss


@pytest.mark.sampled(1)
@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_loss_that_reads_weights_of_an_earlier_stage(dtype: torch.dtype, zero: int) -> None:
    """Their gradients come in the last stage's backward, and again in their own; under ZeRO their memory is freed."""
    given = [nn.Linear(8, 8) for _ in range(4)], [tuple(torch.randn(2, 16, 8).to(dtype))] * 3
    how: dict[str, Any] = {"mesh": "dp=2", "loss_of": of_output_and_weights, "dtype": dtype, "optimizer": sgd}
    expected = trials.taken(*given, schedule="gpipe", **how)
    found = trials.taken(*given, schedule="interleaved-1f1b", chunks=2, zero=zero, **how)
    assert found == pytest.approx(expected, rel=1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("width", WIDTHS)
def test_weights_go_with_their_engine(width: int) -> None:
    engine = engine_of(width, schedule="zb-h1")
    norms(engine, steps=2)
    weights = [weakref.ref(parameter) for parameter in engine.stages[0].parameters()]
    engine.close()
    del engine
    gc.collect()
    assert not any(weight() is not None for weight in weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_figures_that_ride_along_are_added_up_to_the_last_bit(dtype: torch.dtype) -> None:
    figures = torch.randn(ROOM, dtype=torch.float64) * 10.0 ** torch.arange(-20, 20).repeat(5)[:ROOM]
    figures[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    others = torch.zeros(ROOM, dtype=torch.float64)
    memories = torch.full((2, room_for(dtype)), torch.nan, dtype=dtype)
    for memory, brought in zip(memories, (figures, others), strict=True):
        Room(memory).write_figures(brought)
    total = memories.sum(0)
    room = Room(memories[0])
    memories[0].copy_(total)
    assert torch.equal(room.read_figures(ROOM)[3:], figures[3:])
    assert not room.read_figures(3).isfinite().any()


def test_the_engine_made_last_of_the_same_modules_trains_them() -> None:
    plan = qs.compile("zb-h1", mesh="pp=2", microbatches=2)
    data = batch(4)

    def run(transport: Transport) -> None:
        torch.manual_seed(0)
        modules = [linear().double(), nn.Dropout(0.5), linear().double(), nn.Dropout(0.5), linear().double()]
        first = Engine(plan, modules, squared_sum, sgd, transport=transport)
        first.step(*data)
        fresh = Engine(plan, copy.deepcopy(modules), squared_sum, sgd, transport=transport)
        second = Engine(plan, modules, squared_sum, sgd, transport=transport)
        for _ in range(2):
            assert torch.equal(second.step(*data).loss, fresh.step(*data).loss)
        with pytest.raises(qs.UsageError, match="another engine has been made of this one's blocks"):
            first.step(*data)
        own = sgd(second.stages[transport.rank].parameters())
        for optimizer in (own, second.optimizer):
            with pytest.raises(qs.UsageError, match=r"SGD.step\(\) is called on weights that an engine trains"):
                optimizer.step()
        ForwardEngine(qs.compile("inference", mesh="pp=2", microbatches=2), modules, transport=transport)
        own.step()  # an engine that runs forwards alone leaves training to others
        own_of_fresh = sgd(fresh.stages[transport.rank].parameters())
        fresh.close()
        own_of_fresh.step()
        fresh.optimizer.step()

    run_local(2, run)
