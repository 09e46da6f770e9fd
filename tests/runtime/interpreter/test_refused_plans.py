"""Faults that a review of the interpreter found, each with the test that would have shown it.

Those of gradients are in `test_review_gradients`; what is refused rather than run is in `test_limits`. Models here are
a few linear blocks; most runs are compared with the same blocks on one rank, where nothing is sent or sliced.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.graph.edges import build_graph
from quintsched.graph.plan_events import Events
from quintsched.graph.transport_profiles import find_profile
from quintsched.ir import instruction_set as ins
from quintsched.ir.diagnostics import Point
from quintsched.ir.layout import Route
from quintsched.ir.mesh import Mesh
from quintsched.ir.plan_data import ScheduleSpec
from quintsched.passes import TRAIN_PASSES, lower
from quintsched.runtime import Engine
from quintsched.runtime.autograd.kv_store import Past
from quintsched.runtime.blocks.block_outlines import Blocks
from quintsched.runtime.comm import Rules, Transport, run_local

from ..toys import Outcome, sgd, worst_difference
from .test_counterexamples import mutant

WIDTH = 6


def batch(*shape: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, float64."""
    source = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(2, *shape, WIDTH, generator=source, dtype=torch.float64)
    return inputs, targets


def squared_sum(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return (output - target).square().sum(), float(output.numel())


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def train(
    plan: qs.Plan,
    blocks: Blocks | Callable[[], Blocks],
    data: tuple[Tensor, Tensor],
    *,
    rules: Rules = "mailbox",
    steps: int = 2,
    tied: Mapping[str, Sequence[str]] | None = None,
    bucket_mb: float = 25.0,
    **extras: Tensor,
) -> list[Outcome]:
    """Train in process; returns each rank's losses and weights. A function of `blocks` makes them on each rank."""

    def run(transport: Transport) -> Outcome:
        mine = blocks() if callable(blocks) else blocks
        dtype = torch.float64
        engine = Engine(plan, mine, squared_sum, sgd, tied=tied, bucket_mb=bucket_mb, dtype=dtype, transport=transport)
        inputs, targets = (tensor.chunk(engine.num_replicas)[engine.replica] for tensor in data)
        losses = [engine.step(inputs, targets, **extras).loss.item() for _ in range(steps)]
        return Outcome(losses, engine.full_weights())

    return run_local(plan.mesh.size, run, timeout_s=30, rules=rules)


def alone(microbatches: int = 1) -> qs.Plan:
    return qs.compile("1f1b", mesh="pp=1", microbatches=microbatches)


# ---------------------------------------------------------------- order of messages and sums

LOOSE = [
    qs.compile("1f1b", mesh="pp=2", microbatches=4),
    qs.compile("interleaved-1f1b", mesh="pp=2", microbatches=4),
    qs.compile("zb-h1", mesh="pp=3", microbatches=4),
    qs.compile("dualpipe", mesh="pp=2", microbatches=4),
]


def loosened(plan: qs.Plan, chance: random.Random) -> qs.Plan:
    """Move messages to where the planner still calls the plan free of deadlock, but for no stricter profile."""
    while True:
        other = mutant(plan, chance)
        if not queues_are_free(other):
            continue
        plan = other
        if not plan.check().profiles["blocking"] and chance.random() < 0.3:
            return plan


def queues_are_free(plan: qs.Plan) -> bool:
    """Whether a plan is sound but for the order in which hosts issue it."""
    if any(finding.point is not Point.DEADLOCK for finding in plan.check(profile="channel").findings):
        return False
    return build_graph(Events.merge(plan), plan.flows, find_profile("channel")).run_events().finished


def is_runnable(plan: qs.Plan) -> bool:
    return plan.check(profile="channel").sound


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", LOOSE, ids=lambda plan: plan.title)
def test_what_is_not_refused_runs_with_messages_in_order(plan: qs.Plan) -> None:
    chance, data = random.Random(0), batch(4)
    plans = [loosened(plan, chance) for _ in range(10)]
    blocks = [linear] * len(plan.stage_to_pp)
    expected = train(plan, blocks, data, steps=1)
    for loose in filter(is_runnable, plans):
        found = train(loose, blocks, data, steps=1, rules="nccl")
        assert all(outcome.losses == expected[0].losses for outcome in found)
    assert not all(map(is_runnable, plans)), "all of them could have been run before"


@pytest.mark.parametrize("rules", ["mailbox", "nccl"])
def test_a_sum_of_tied_weights_may_stand_before_other_work(rules: Rules) -> None:
    plan = qs.compile("interleaved-1f1b", mesh="pp=2", microbatches=2, chunks=3, tied={"w": (1, 4)})
    first = list(plan.programs[0])
    sync = next(i for i in first if isinstance(i, ins.SyncTied))
    first.remove(sync)
    first.insert(1 + max(k for k, i in enumerate(first) if isinstance(i, ins.Bwd) and i.stage == 4), sync)
    early = replace(plan, programs=(tuple(first), plan.programs[1]))
    tied = {"w": ("1.weight", "4.weight")}
    expected, found = (train(p, [linear] * 6, batch(4), tied=tied, rules=rules) for p in (plan, early))
    for before, after in zip(expected, found, strict=True):
        assert after.losses == before.losses
        assert all(torch.equal(weight, before.weights[name]) for name, weight in after.weights.items())


class Added(nn.Module):
    """Stands between two ranks with numbers that are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)


class ToComplex(Added):
    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(self.layer(x), x)


class FromComplex(Added):
    def forward(self, z: Tensor) -> Tensor:
        return self.layer((z * z).real)  # type: ignore[no-any-return]


def test_gradients_of_complex_activations_come_back() -> None:
    blocks = [ToComplex, FromComplex]
    expected = train(alone(2), blocks, batch(4))[0]
    found = train(qs.compile("1f1b", mesh="pp=2", microbatches=2), blocks, batch(4))
    assert worst_difference(found, expected) < 1e-12


# ---------------------------------------------------------------- recomputation and slices


def test_a_recomputed_batch_norm_counts_once() -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    inputs, targets = (tensor.float() for tensor in batch(8))

    def buffers(recompute: int) -> dict[str, Tensor]:
        plan = qs.compile("1f1b", mesh="pp=1", microbatches=2, recompute=recompute)
        engine = Engine(plan, [normed, normed], squared_sum, sgd)
        engine.step(inputs, targets)
        return {name: tensor for name, tensor in engine.state_dict().items() if ".1.running" in name or "num_" in name}

    kept, recomputed = buffers(0), buffers(1)
    assert {int(tensor) for name, tensor in recomputed.items() if "num_" in name} == {2}
    assert all(torch.equal(tensor, kept[name]) for name, tensor in recomputed.items())


class Attention(nn.Module):
    """Causal attention with one head over (samples, sequence, WIDTH); a sample's mean `shift` is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, past: Past | None = None, shift: Tensor | None = None) -> Tensor:
        query, keys, values = (layer(x).unsqueeze(1) for layer in (self.query, self.key, self.value))
        if past is not None:
            keys, values = past.extend(self, keys, values)
        new, seen = query.shape[2], keys.shape[2]
        mask = torch.ones(new, seen, dtype=torch.bool, device=x.device).tril(seen - new)
        found = nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        shifted = x if shift is None else x + shift.reshape(len(x), -1).mean(1)[:, None, None]
        return shifted + found.squeeze(1)


def split_in_slices(slices: int) -> qs.Plan:
    """One microbatch on one rank: slices forward, then input halves backward, then weight halves."""
    order = (
        *(ins.Fwd(0, unit) for unit in range(slices)),
        *(ins.BwdInput(0, unit) for unit in reversed(range(slices))),
        *(ins.BwdWeight(0, unit) for unit in reversed(range(slices))),
    )
    return lower(
        qs.Plan(
            mode="train",
            schedule=ScheduleSpec("mine", 1, 1, slices, {}),
            mesh=Mesh.parse("pp=1"),
            stage_to_pp=(0,),
            routes=(Route((0,), tuple(range(slices))),),
            buckets_per_stage=1,
            programs=(order,),
        ),
        TRAIN_PASSES,
    )


@pytest.mark.parametrize("samples", [1, 3])
def test_slices_with_split_backwards(samples: int) -> None:
    expected = train(alone(), [Attention, Attention], batch(samples, 6))[0]
    found = train(split_in_slices(3), [Attention, Attention], batch(samples, 6))
    assert worst_difference(found, expected) < 1e-12


def test_a_number_per_sample_goes_to_every_slice() -> None:
    shift = torch.arange(4, dtype=torch.float64)
    expected = train(alone(2), [Attention, Attention], batch(4, 6), shift=shift)[0]
    plan = qs.compile("seq-1f1b", mesh="pp=2", microbatches=2, slices=3)
    found = train(plan, [Attention, Attention], batch(4, 6), shift=shift)
    assert worst_difference(found, expected) < 1e-12


# ---------------------------------------------------------------- what steps leave behind


def test_a_counted_step_leaves_the_trace_alone(tmp_path: Path) -> None:
    inputs, targets = (tensor.float() for tensor in batch(4))
    engine = Engine(alone(2), [linear, linear], squared_sum, sgd, trace_steps=[1, 2])
    engine.step(inputs, targets)
    engine.step_counting_saved(inputs, targets)
    assert torch.isfinite(engine.step(inputs, targets).loss)
    engine.save_trace(tmp_path)
    steps = json.loads((tmp_path / "rank0.json").read_text())["steps"]
    assert [step["step"] for step in steps] == [2]


def test_a_batch_is_let_go_of_after_its_step() -> None:
    engine = Engine(alone(2), [linear, linear], squared_sum, sgd, dtype=torch.float64)
    engine.step(*batch(4))
    engine.evaluate(*batch(4))
    assert set(engine._runner.interpreters) == {"train", "forward"}
    for interpreter in engine._runner.interpreters.values():
        assert not interpreter.state.current.batch.inputs
        assert not interpreter.state.current.batch.targets


def test_what_an_evaluation_sent_is_let_go_of_by_the_next_step() -> None:
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=4)

    def run(transport: Transport) -> tuple[int, int]:
        engine = Engine(plan, [linear, linear], squared_sum, sgd, dtype=torch.float64, transport=transport)
        engine.evaluate(*batch(4))
        kept = sends_in_flight(engine)
        engine.step(*batch(4))
        return kept, sends_in_flight(engine)

    assert run_local(2, run, rules="rendezvous") == [(4, 0), (0, 0)]


def sends_in_flight(engine: Engine) -> int:
    evaluation = engine._runner.interpreters["forward"]
    return sum(cell.sent is not None for cell in evaluation.state.cells.sending)


@pytest.mark.parametrize("recompute", [0, 1])
def test_a_first_operation_may_be_in_place(recompute: int) -> None:
    """Inputs are leaves of the stage's graph, and given again if the stage is run again: so it gets a copy."""
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2, recompute=recompute)
    plain = train(plan, [linear, lambda: nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH))], batch(4))
    blocks = [linear, lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))]
    for one, other in zip(train(plan, blocks, batch(4)), plain, strict=True):
        assert one.losses == other.losses
        assert all(torch.equal(weight, other.weights[name]) for name, weight in one.weights.items())
