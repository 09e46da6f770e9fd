"""ZeRO: what is sharded changes no number, is resident only while it is used, and takes the memory predicted."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.runtime import Engine, Transport, run_local
from quintsched.runtime.train.built_in_losses import cross_entropy_sum
from quintsched.runtime.weights_and_gradients.resident_weight_bytes import StateBytes

from ..parallel.lively import lively_gpt
from ..toys import adam, ids_task, share
from ..trials import copied, require_same

DEPTH, LENGTH, SAMPLES = 4, 8, 8
STAGES = (1, 2, 3)


def engine_on(transport: Transport, plan: qs.Plan, dtype: torch.dtype = torch.float64) -> Engine:
    told: dict[str, Any] = {"clip": 1.0, "bucket_mb": 0.01, "block_costs": [1.0] * (DEPTH + 2), "dtype": dtype}
    return Engine(plan, lively_gpt(LENGTH), cross_entropy_sum, adam, transport=transport, **told)


def compiled(zero: int, mesh: str = "dp=2,pp=2") -> qs.Plan:
    return qs.compile("1f1b", mesh=mesh, microbatches=2, zero=zero)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("zero", STAGES)
def test_a_run_goes_on_bit_by_bit_from_its_state(zero: int, dtype: torch.dtype) -> None:
    task = ids_task(4, SAMPLES, LENGTH)

    def train(engine: Engine, steps: range) -> list[float]:
        return [engine.step(*share(engine, task.inputs[n], task.targets[n])).loss.item() for n in steps]

    def run(transport: Transport) -> None:
        first = engine_on(transport, compiled(zero), dtype=dtype)
        train(first, range(2))
        state = copied(first.state_dict())
        losses = train(first, range(2, 4))
        second = engine_on(transport, compiled(zero), dtype=dtype)
        second.load_state_dict(state)
        assert train(second, range(2, 4)) == losses
        require_same(second.full_weights(), first.full_weights())
        master = torch.float32 if dtype == torch.bfloat16 else dtype
        held = [tensor for name, tensor in state.items() if name.startswith("model.")]
        assert {(tensor.dtype, tensor.dim()) for tensor in held} == {(master, 1)}, "in segments"

    run_local(4, run)


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


WIDTH = 128
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "dualpipe-v")


def measure(plan: qs.Plan, width: int = WIDTH) -> list[StateBytes]:
    """Train two steps of eight layers; returns each rank's peaks."""

    def run(transport: Transport) -> StateBytes:
        told: dict[str, Any] = {"bucket_mb": 0.01, "block_costs": [1.0] * 8, "transport": transport}
        engine = Engine(plan, [partial(nn.Linear, width, width)] * 8, nn.functional.mse_loss, adam, **told)
        inputs, targets = torch.randn(2, 16, width).unbind()
        for _ in range(2):
            engine.step(*share(engine, inputs, targets))
        return engine.state_bytes()

    return run_local(plan.mesh.size, run)


def formula(held: float, zero: int, replicas: int, stages: int = 1) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer state of a rank that holds so many bytes of weights."""
    gathered = min(stages, 2) * held / stages
    weights = held / replicas + gathered if zero == 3 else held
    gradients = held / replicas + held / stages if zero >= 2 else held
    return weights, gradients, 2 * held / (replicas if zero else 1)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("mesh", "replicas"), [("dp=2,pp=2", 2), ("dp=4", 4)])
def test_memory_is_that_of_the_formula_and_of_the_simulator(schedule: str, mesh: str, replicas: int) -> None:
    held = 8 * (WIDTH + 1) * WIDTH * 4 / qs.Mesh.parse(mesh).pp
    for zero in (0, *STAGES):
        plan = qs.compile(schedule, mesh=mesh, microbatches=4, zero=zero)
        expected = formula(held, zero, replicas, len(plan.layout.stages_of(0)))
        costs = qs.Costs(weights=held, gradients=held, optimizer_state=2 * held)
        for rank, found in enumerate(measure(plan)):
            assert (found.weights, found.gradients, found.optimizer) == pytest.approx(expected, rel=0.01), (zero, rank)
            simulated = plan.simulate(costs).peak_state[plan.mesh.pp_rank(rank)]
            assert found.total == pytest.approx(simulated, rel=0.01), (zero, rank)


@pytest.mark.parametrize("zero", [0, *STAGES])
def test_alignment_adds_at_most_32_elements_for_each_weight_and_shard(zero: int) -> None:
    width, weights, shards = 13, 16, 2
    held, unused = 8 * (width + 1) * width * 4, 32 * 4 * (weights + shards)
    for found in measure(qs.compile("1f1b", mesh="dp=2", microbatches=4, zero=zero), width):
        exact, copies = formula(held, zero, replicas=2), (1.5 if zero == 3 else 1, 1.5 if zero >= 2 else 1, 2)
        given = zip((found.weights, found.gradients, found.optimizer), exact, copies, strict=True)
        assert all(abs(bytes_ - wanted) <= many * unused for bytes_, wanted, many in given)
