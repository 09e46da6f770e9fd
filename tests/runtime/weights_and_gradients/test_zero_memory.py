"""ZeRO: weights, gradients and optimizer state take the memory of the formula, and of the simulator."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.weights_and_gradients.resident_weight_bytes import StateBytes

from ..toys import adam, share

WIDTH, STAGES = 128, (1, 2, 3)
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "dualpipe-v")


def wide() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def measure(plan: qs.Plan, dtype: torch.dtype = torch.float32) -> list[StateBytes]:
    """Train two steps; returns each rank's peaks."""

    def run(transport: Transport) -> StateBytes:
        engine = Engine(
            plan,
            [wide] * 8,
            nn.functional.mse_loss,
            adam,
            bucket_mb=0.01,
            block_costs=[1.0] * 8,
            dtype=dtype,
            transport=transport,
        )
        inputs, targets = torch.randn(2, 16, WIDTH, dtype=dtype).unbind()
        for _ in range(2):
            engine.step(*share(engine, inputs, targets))
        return engine.state_bytes()

    return run_local(plan.mesh.size, run)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("mesh", "replicas"), [("dp=2,pp=2", 2), pytest.param("dp=4", 4, marks=pytest.mark.slow)])
def test_memory_is_that_of_the_formula_and_of_the_simulator(schedule: str, mesh: str, replicas: int) -> None:
    held = 8 * (WIDTH + 1) * WIDTH * 4 / qs.Mesh.parse(mesh).pp
    for zero in (0, *STAGES):
        plan = qs.compile(schedule, mesh=mesh, microbatches=4, zero=zero)
        stages = len(plan.layout.stages_of(0))
        gathered = min(stages, 2) * held / stages
        weights = held / replicas + gathered if zero == 3 else held
        gradients = held / replicas + held / stages if zero >= 2 else held
        optimizer = 2 * held / (replicas if zero else 1)
        costs = qs.Costs(weights=held, gradients=held, optimizer_state=2 * held)
        for rank, found in enumerate(measure(plan)):
            assert found.weights == pytest.approx(weights, rel=0.01), (zero, rank)
            assert found.gradients == pytest.approx(gradients, rel=0.01), (zero, rank)
            assert found.optimizer == pytest.approx(optimizer, rel=0.01), (zero, rank)
            simulated = plan.simulate(costs).peak_state[plan.mesh.pp_rank(rank)]
            assert found.total == pytest.approx(simulated, rel=0.01), (zero, rank)


def test_masters_of_short_weights_are_sharded_and_count_as_the_optimizers() -> None:
    numbers = 8 * (WIDTH + 1) * WIDTH
    plan = qs.compile("1f1b", mesh="dp=4", microbatches=2, zero=3)
    for found in measure(plan, torch.bfloat16):
        assert found.weights == pytest.approx(2 * numbers / 4 + 2 * numbers, rel=0.01)
        assert found.gradients == pytest.approx(4 * numbers / 4 + 4 * numbers, rel=0.01)
        assert found.optimizer == pytest.approx(12 * numbers / 4, rel=0.01)
