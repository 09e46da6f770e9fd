"""Whatever the checker lets pass trains as one process does: mutants of plans that are sound, run on a toy model.

Each piece of the model is one linear block whose output at a place of the sequence also has the sum of keys before it:
so slices, pieces in another order and microbatches seen twice all show in the weights after two steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.ir.instructions import Overlap
from quintsched.runtime import Engine
from quintsched.runtime.autograd.kv_store import Past
from quintsched.runtime.blocks.blocks import build_model
from quintsched.runtime.comm import Rules, Transport, run_local

from ..planner.verify.mutants import (
    any_mutant,
    offloaded_plans,
    overlapping_plans,
    small_plans,
    spelled_plans,
    uneven_plans,
)
from .toys import Outcome, worst_difference

WIDTH, LENGTH, STEPS = 3, 4, 2
UNEVEN = [replace(plan, blocks_per_stage=()) for plan in uneven_plans()]
"""Each piece of the model is one block here."""
SEEDS = [*small_plans(), *spelled_plans() * 4, *overlapping_plans() * 4, *UNEVEN * 4, *offloaded_plans() * 4]
PLANS = [plan for plan in SEEDS if plan.mode == "train"]
NAMED = {"embedding": "layer.weight", "more": "key.weight"}
"""Which weight of a block each name ties that a plan, or a change of it, has."""


class Toy(nn.Module):
    """y = layer(x) + the sum of key(x) up to here; linear, and causal over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, past: Past | None = None) -> Tensor:
        keys = self.key(x).unsqueeze(1)
        if past is not None:
            keys, _ = past.extend(self, keys, keys)
        new, seen = x.shape[1], keys.shape[2]
        return self.layer(x) + torch.ones(new, seen, dtype=x.dtype).tril(seen - new) @ keys.squeeze(1)


def squared_sum(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return (output - target).square().sum(), float(output.numel())


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


@cache
def batch(samples: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(2, samples, LENGTH, WIDTH, generator=source, dtype=torch.float64)
    return inputs, targets


def tied_weights(tied: Mapping[str, Sequence[int]]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(f"{stage}.{NAMED[name]}" for stage in stages) for name, stages in tied.items()}


@cache
def train_alone(pieces: int, samples: int, tied: tuple[tuple[str, tuple[int, ...]], ...]) -> Outcome:
    """Train the pieces in one process, on the whole batch at once; tied weights under all their names."""
    model = build_model([Toy] * pieces, 0, torch.float64)
    names = tied_weights(dict(tied))
    for first, *others in names.values():
        for other in others:
            owner, _, name = other.rpartition(".")
            setattr(model.get_submodule(owner), name, model.get_parameter(first))
    inputs, targets = batch(samples)
    losses, stepper = [], sgd(list(model.parameters()))
    for _ in range(STEPS):
        stepper.zero_grad()
        loss, weight = squared_sum(model(inputs), targets)
        (loss / weight).backward()
        stepper.step()
        losses.append(float(loss.detach()) / weight)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights |= {other: weights[first] for first, *others in names.values() for other in others}
    return Outcome(losses, weights)


def train(plan: qs.Plan, rules: Rules) -> list[Outcome]:
    pieces, samples, tied = shape_of(plan)
    inputs, targets = batch(samples)

    def run(transport: Transport) -> Outcome:
        blocks, dtype, names = [Toy] * pieces, torch.float64, tied_weights(dict(tied))
        engine = Engine(plan, blocks, squared_sum, sgd, dtype=dtype, tied=names, transport=transport)
        mine = (tensor.chunk(engine.num_replicas)[engine.replica] for tensor in (inputs, targets))
        share = tuple(mine)
        losses = [engine.step(*share).loss.item() for _ in range(STEPS)]
        return Outcome(losses, engine.full_weights())

    return run_local(plan.mesh.size, run, timeout_s=60, rules=rules)


def shape_of(plan: qs.Plan) -> tuple[int, int, tuple[tuple[str, tuple[int, ...]], ...]]:
    """Return how many pieces the model has, how many samples a batch, and what is tied."""
    pieces = len(set(plan.stage_to_part or range(len(plan.stage_to_pp))))
    replicas = plan.mesh.size // plan.mesh.pp
    return pieces, plan.schedule.microbatches * replicas, tuple(sorted(plan.tied.items()))


def require_equality(plan: qs.Plan, rules: Rules = "nccl") -> None:
    difference = worst_difference(train(plan, rules), train_alone(*shape_of(plan)))
    assert difference < 1e-10, (difference, plan.title, plan.to_json())


def accepted(seed: int, count: int, plans: Sequence[qs.Plan] = PLANS) -> list[qs.Plan]:
    """Return those of so many mutants that are sound and are not what they were made from, each once."""
    random, found = Random(seed), {}
    for _ in range(count):
        plan = random.choice(plans)
        changed = replace(any_mutant(plan, random), blocks_per_stage=())
        if changed != plan and changed.check(profile="blocking").sound:
            found[changed.to_json()] = changed
    return list(found.values())


@pytest.mark.parametrize("plan", PLANS[::31], ids=lambda plan: plan.title)
def test_what_is_compiled_trains_as_one_process_does(plan: qs.Plan) -> None:
    require_equality(plan)


def test_mutants_that_are_sound_train_as_one_process_does() -> None:
    plans = accepted(0, 400)
    assert len(plans) > 10
    for plan in plans[:20]:
        require_equality(plan)


def test_mutants_of_pairs_that_are_sound_train_as_one_process_does() -> None:
    """Forwards put beside other backwards than before, pairs taken apart, microbatches renamed in them."""
    plans = [plan for plan in overlapping_plans() if plan.mesh.size <= 4]
    found = [plan for plan in accepted(0, 500, plans) if len(plan.columns.rows_where(Overlap))]
    assert len(found) > 20
    for plan in found[:12]:
        require_equality(plan)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 41))
def test_all_sound_ones_of_a_hundred_thousand_mutants_train_as_one_process_does(seed: int) -> None:
    for plan in accepted(seed, 2500):
        require_equality(plan)
