"""Mutants of sound plans: those that pass the checker train as one process does, on a toy model.

Each piece of the model is one linear block whose output at a place of the sequence also has the sum of keys before it:
so slices, pieces in another order and microbatches seen twice all show in the weights after two steps. A piece sends
and takes what the plan's skips say, and has a loss where the plan has one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from inspect import Parameter, Signature
from itertools import islice
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Carry
from quintsched.runtime.autograd.slice_kv_cache import Past
from quintsched.runtime.comm import Rules

from ..helpers import training
from ..planner.verify.mutants import any_mutant
from ..planner.verify.small_plans import DRAWN, Recipe, any_plan
from .linear_blocks import squared_sum

WIDTH, LENGTH, STEPS = 3, 4, 2
TRAINING = [recipe for recipe in DRAWN if recipe.schedule.mode == "train"]
NAMED = {"embedding": "layer.weight", "more": "key.weight", "bias": "layer.bias"}
"""Weight of a block for each tied name that a plan, or a change of it, has."""


FACTORS = {"all": 0.5, "far": 0.25, "more": -0.3, "h": 0.2}
"""Factor by which a piece multiplies each skip that it takes."""


class Toy(nn.Module):
    """y = layer(x) + the sum of key(x) up to here + skips; linear, and causal over the sequence."""

    sends: tuple[str, ...] = ()
    has_loss = False

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(
        self, x: Tensor, past: Past | None = None, targets: Tensor | None = None, **taken: Tensor
    ) -> Tensor | Carry | tuple[Tensor | Carry, Tensor]:
        keys = self.key(x).unsqueeze(1)
        if past is not None:
            keys, _ = past.extend(self, keys, keys)
        new, seen = x.shape[1], keys.shape[2]
        y = self.layer(x) + torch.ones(new, seen, dtype=x.dtype).tril(seen - new) @ keys.squeeze(1)
        y = sum((FACTORS[name] * skip for name, skip in sorted(taken.items())), y)
        output = Carry(y, **dict.fromkeys(self.sends, y)) if self.sends else y
        return (output, 0.3 * (y - targets).square().sum()) if targets is not None else output


@cache
def toy(sends: tuple[str, ...], takes: tuple[str, ...], has_loss: bool) -> type[Toy]:
    """Return the class of pieces that send these names along, take those, and may have a loss of their own."""

    def forward(self: Toy, x: Tensor, **more: Tensor) -> object:
        return Toy.forward(self, x, **more)

    given = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", "x")]
    named = ["past", *takes, *(["targets"] if has_loss else [])]
    by_name = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in named]
    forward.__signature__ = Signature([*given, *by_name])  # type: ignore[attr-defined]
    return type("ToyPiece", (Toy,), {"forward": forward, "sends": sends, "has_loss": has_loss})


class ModelShape(NamedTuple):
    """Shape of the model: its pieces, the samples of a batch, ties by stages, skips and losses by pieces."""

    pieces: int
    samples: int
    tied: tuple[tuple[str, tuple[int, ...]], ...]
    skips: tuple[tuple[str, tuple[int, ...]], ...]
    losses: tuple[int, ...]

    def blocks(self) -> list[type[Toy]]:
        return [
            toy(
                tuple(name for name, pieces in self.skips if pieces[0] == piece),
                tuple(name for name, pieces in self.skips if piece in pieces[1:]),
                piece in self.losses and piece < self.pieces - 1,
            )
            for piece in range(self.pieces)
        ]


sgd = partial(torch.optim.SGD, lr=0.01)


@cache
def batch(samples: int) -> tuple[Tensor, Tensor]:
    inputs, targets = training.random_batch(0, samples, LENGTH, WIDTH)
    return inputs, targets


def tied_weights(tied: Mapping[str, Sequence[int]]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(f"{stage}.{NAMED[name]}" for stage in stages) for name, stages in tied.items()}


@cache
def train_alone(shape: ModelShape) -> training.Outcome:
    """Train the pieces in one process, on the whole batch at once; tied weights under all their names."""
    batches, tied = [batch(shape.samples)] * STEPS, tied_weights(dict(shape.tied))
    return training.train_alone(shape.blocks(), squared_sum, sgd, batches, tied=tied)


def train(plan: qs.Plan, rules: Rules) -> list[training.Outcome]:
    shape = shape_of(plan)
    batches, tied = [batch(shape.samples)] * STEPS, tied_weights(dict(shape.tied))
    how: dict[str, Any] = {"dtype": torch.float64, "tied": tied, "wire": rules}
    return training.train_ranks(plan, shape.blocks(), squared_sum, sgd, batches, **how)


def shape_of(plan: qs.Plan) -> ModelShape:
    """Return the model that a plan trains, and the batch."""
    part_of = plan.layout.part_of
    return ModelShape(
        pieces=len(set(plan.stage_to_part or range(len(plan.stage_to_pp)))),
        samples=plan.schedule.microbatches * (plan.mesh.size // plan.mesh.pp),
        tied=tuple(sorted(plan.tied.items())),
        skips=tuple((name, tuple(map(part_of, stages))) for name, stages in sorted(plan.skips.items())),
        losses=tuple(map(part_of, plan.losses)),
    )


def require_equality(plan: qs.Plan, rules: Rules = "nccl") -> None:
    difference = training.worst_difference(train(plan, rules), train_alone(shape_of(plan)))
    assert difference < 1e-10, (difference, plan.title, plan.to_json())


def of_single_blocks(plan: qs.Plan) -> qs.Plan:
    """Each piece of the model is one block here, of which a stage that recomputes runs all again."""
    return replace(plan, blocks_per_stage=(), recompute=tuple(min(every, 1) for every in plan.recompute))


def accepted(seed: int, count: int) -> Iterator[qs.Plan]:
    """Yield those of so many mutants that are sound on NCCL and are not what they were made from, each once."""
    random, found = Random(seed), set[str]()
    for _ in range(count):
        plan = of_single_blocks(any_plan(TRAINING, random))
        changed = of_single_blocks(any_mutant(plan, random))
        if changed != plan and changed.check(profile="channel").sound:
            text = changed.to_json()
            if text not in found:
                found.add(text)
                yield changed


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recipe", TRAINING[::31], ids=str)
def test_what_is_compiled_trains_as_one_process_does(recipe: Recipe) -> None:
    require_equality(of_single_blocks(recipe.plan))


@pytest.mark.parametrize(
    ("seed", "count", "most"),
    [(0, 150, 6), *(pytest.param(k, 250, None, marks=pytest.mark.slow) for k in range(1, 41))],
)
def test_mutants_that_are_sound_train_as_one_process_does(seed: int, count: int, most: int | None) -> None:
    """About 650 of 10,000. That what is sound computes the gradient, test_soundness asks of ten times as many."""
    plans = [*islice(accepted(seed, count), most)]
    assert len(plans) >= (most or 1)
    for plan in plans:
        require_equality(plan)
