"""Runs whose activations go to the host and come back: the bits of runs where they stay, in less memory."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.instructions import FetchAct, HostCopy, OffloadAct
from quintsched.passes.place_offloads import least_cap
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.interpreter.offload_instructions import MovedActivations
from quintsched.runtime.train.built_in_losses import cross_entropy_sum
from quintsched.trace.measured_trace import Trace

from ...helpers.blocks import of_layers
from ...helpers.training import random_batch
from ..toys import Task, ids_task, peaks_of_saved, sgd, tiny_gpt, tiny_vit, train_on
from ..trials import on_ranks

TRAINING = [found for found in qs.all_schedules() if found.mode == "train"]
LIGHT = qs.Costs(activation_after_input=0.25)


def test_memory_is_really_free_once_it_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else holds on to it: neither inputs of stages, nor receive buffers, nor the graph."""
    original, shares = MovedActivations.free, list[float]()

    def free(self: MovedActivations, index: int, saved: object, offloaded: object) -> None:
        memories = self._leaving[saved].memories
        left = [(memory.bytes.nbytes, memory.bytes.untyped_storage()._weak_ref()) for memory in memories]
        del memories
        original(self, index, saved, offloaded)
        gone = sum(size for size, storage in left if torch.UntypedStorage._expired(storage))
        shares.append(gone / sum(size for size, _ in left))

    monkeypatch.setattr(MovedActivations, "free", free)
    plan = qs.compile("interleaved-1f1b", mesh="pp=2", microbatches=4, offload=0.5)
    train_on(plan, Task.make(1, 8, torch.float64), tiny_vit(6))
    assert len(shares) == sum(isinstance(i, OffloadAct) for program in plan.programs for i in program) > 0
    assert shares == [1.0] * len(shares)


BANDWIDTH = 1e6
"""Of the link below, in bytes a second."""


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, float]:
    """A traced step over a slow link, and how long a copy of a microbatch's activations is on it, in milliseconds."""
    folder = tmp_path_factory.mktemp("trace")
    plan = qs.compile("gpipe", mesh="pp=1", microbatches=4, offload=2)
    task = ids_task(2, 8, 8)

    def run(transport: Transport) -> int:
        engine = Engine(plan, tiny_gpt(8), cross_entropy_sum, sgd, trace_steps=[1], transport=transport)
        engine.step(task.inputs[0], task.targets[0])
        engine.step(task.inputs[1], task.targets[1])
        engine.save_trace(folder)
        return engine.step_counting_saved(task.inputs[0], task.targets[0])[1].peak

    (peak,) = run_local(1, run, host_bandwidth=BANDWIDTH)
    return Trace.load(Path(folder), plan), peak / 2 / BANDWIDTH * 1e3


def test_a_trace_has_the_copies_when_they_ran(traced: tuple[Trace, float]) -> None:
    trace, copy_ms = traced
    copies = [span for span in trace.step().timeline[0] if isinstance(span.instruction, HostCopy)]
    assert {type(span.instruction) for span in copies} == {OffloadAct, FetchAct}
    for span in copies:
        assert span.end - span.start == pytest.approx(copy_ms, rel=0.05)
        assert span.wait == 0
    offloads = [span for span in copies if isinstance(span.instruction, OffloadAct)]
    assert all(other.start >= one.end - 0.001 for one, other in pairwise(offloads))


def test_the_costs_of_a_trace_know_the_link(traced: tuple[Trace, float]) -> None:
    trace, copy_ms = traced
    costs = trace.costs()
    assert costs.host_bandwidth == pytest.approx(1 / copy_ms, rel=0.05)
    assert max(costs.forward) < copy_ms, "a forward is not what waits for a copy before it"


def measure(plan: qs.Plan) -> tuple[list[int], tuple[float, ...]]:
    return peaks_of_saved(plan, ids_task(2, 16, length=8), tiny_gpt(8, depth=6))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("schedule", TRAINING, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("kept", [{}, {"recompute": 1}, {"offload": True}], ids=str)
def test_the_peak_is_the_simulated_one(schedule: qs.Schedule, kept: dict[str, int]) -> None:
    """Within 1 %; slices that go to the host differ from each other, so that what one holds is known to 3 %."""
    shape: dict[str, Any] = {"mesh": "pp=2", "microbatches": 8, "slices": min(2, schedule.max_slices)}
    if "offload" not in kept:
        measured, simulated = measure(qs.compile(schedule, **shape, **kept))
        assert measured == pytest.approx(simulated, rel=0.01)
        return
    free = qs.compile(schedule, **shape, costs=LIGHT if schedule.searches else None)
    capped = qs.compile(schedule, **shape, costs=LIGHT, offload=least_cap(free, LIGHT))
    assert any(isinstance(i, HostCopy) for program in capped.programs for i in program)
    measured, simulated = measure(capped)
    assert measured == pytest.approx(simulated, rel=0.03 if shape["slices"] > 1 else 0.01)
    assert max(capped.simulate(LIGHT).peak_activations) <= max(free.simulate(LIGHT).peak_activations)


def test_microbatches_without_samples_count_for_nothing() -> None:
    measured, simulated = peaks_of_saved(
        qs.compile("zb-h1", mesh="pp=2", microbatches=4), ids_task(2, 2, 8), tiny_gpt(8)
    )
    assert measured == pytest.approx(simulated, rel=0.01)


class Keeps(torch.autograd.Function):
    """Keeps its input in a way of its own, which autograd knows nothing of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x.cos()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient * ctx.x.sin()


Hoarder = of_layers("Hoarder", lambda: {"layer": nn.Linear(6, 6)}, lambda self, x: Keeps.apply(x) + self.layer(x))


def test_what_a_backward_keeps_of_its_input_stays_what_it_was() -> None:
    """In one process, in the buffers of messages, and where activations go to the host."""
    asked, batch = ({"mesh": "dp=1"}, {"mesh": "pp=2"}, {"mesh": "pp=2", "offload": 1}), random_batch(0, 8, 6)
    told: dict[str, Any] = {"schedule": "gpipe", "microbatches": 4, "dtype": torch.float64}

    def work(engine: Engine) -> list[float]:
        return [float(engine.step(*batch).loss) for _ in range(3)]

    losses = [on_ranks(work, [Hoarder] * 4, **told | more)[0] for more in asked]
    assert losses == losses[:1] * 3
