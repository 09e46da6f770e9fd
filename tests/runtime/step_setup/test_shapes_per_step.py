"""Other shapes, numbers of microbatches and ends of data in every step: the numbers of one process everywhere."""

import logging
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.ir.plan_data import ScheduleSpec
from quintsched.runtime import Engine, drained
from quintsched.runtime.blocks.block_builders import Blocks
from quintsched.runtime.comm import Rules
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import MoEGPTOptions, moe_gpt
from quintsched.runtime.train.built_in_losses import correct_sum, cross_entropy_sum

from ...helpers.blocks import of_kind, of_layers
from ...helpers.training import Outcome, Step, require_equal, run_engines, train_ranks
from ..toys import CLASSES, sgd
from .changing import LONGEST, Batch, Shape, batches, small_gpt, train_alone, train_on

ONE = [
    Shape([(4, 8)]),
    Shape([(5, 16)]),
    Shape([(2, 4)]),
    Shape([(7, 8)], evaluates=True),
    Shape([(1, 12)]),
    Shape([(4, 8)]),
    Shape([(3, 8)], evaluates=True),
]
TWO = [
    Shape([(4, 8), (4, 8)]),
    Shape([(5, 16), (3, 4)]),
    Shape([(1, 4), (6, 8)]),
    Shape([(0, 4), (6, 8)]),
    Shape([(2, 8), (0, 4)], evaluates=True),
    Shape([(4, 8), (4, 8)]),
]


Penalised = of_kind(nn.Linear, lambda self, x: ((y := nn.Linear.forward(self, x)).tanh(), y.square().mean()))
"""A layer with a loss of its own, a mean, which of no samples is 0 / 0."""


def test_means_over_units_without_samples_count_for_nothing() -> None:
    """Over ep they are computed, for what experts exchange; over dp they are not."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    steps = [Step([(x[:4], x[:4]), (x[4:cut], x[4:cut])]) for cut in (6, 5, 4)]
    over_ep, over_dp = (
        train_ranks(
            qs.compile("1f1b", mesh=mesh, microbatches=2), [lambda: Penalised(4, 4)] * 2, nn.MSELoss(), sgd, steps,
            dtype=torch.float64,
        )
        for mesh in ("ep=2", "dp=2")
    )  # fmt: skip
    require_equal(over_ep, over_dp[0])


STEPS = [Shape([(4, 8), (4, 8)]), Shape([(3, 8), (2, 4)]), Shape([(4, 8), (0, 8)]), Shape([(2, 16), (0, 8)])]


def loader(replica: int) -> list[Batch]:
    """Return a replica's batches: four of the first, two of the second."""
    found = [batches(shape, step)[replica] for step, shape in enumerate(STEPS)]
    return [batch for batch in found if len(batch[0])]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("drains", [True, False])
@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,pp=2"])
def test_loaders_end_together_and_who_has_no_more_data_waits_for_the_others(mesh: str, zero: int, drains: bool) -> None:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2, zero=zero)

    def body(engine: Engine) -> Outcome:
        needs_data, results = engine.needs_inputs or engine.needs_targets, list[Any]()
        if drains:
            batches = drained(loader(engine.replica) if needs_data else None, engine)
            results = [engine.step(inputs, targets) for inputs, targets in batches]
        else:
            results = [engine.step(*batch) for batch in loader(engine.replica)]
            assert engine.no_more_data(results.append) == len(STEPS) - len(loader(engine.replica))
        assert engine.state_dict()["engine.step"] == len(STEPS)
        figures = [(result.weight.item(), result.metrics["accuracy"].item()) for result in results]
        return Outcome([result.loss.item() for result in results], engine.full_weights(), figures=figures)

    told: dict[str, Any] = {"metrics": {"accuracy": correct_sum}, "dtype": torch.float64}
    found = run_engines(plan, small_gpt, body, cross_entropy_sum, sgd, **told)
    require_equal(found, train_alone(small_gpt(), STEPS))


class Chosen(nn.Module):
    """Experts over the tokens that are theirs, as transformers' default mixtures loop over them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        chosen, mixed = rows.detach().sum(-1).mul(10).long() % 3, torch.zeros_like(rows)
        for number in chosen.unique().tolist():
            places = (chosen == number).nonzero()[:, 0]
            mixed = mixed.index_add(0, places, self.experts[number](rows[places]))
        return x + mixed.view_as(x)


class Measured(nn.Module):
    """Scales by what a number of the data says."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scale = 2.0 if x.detach().abs().max().item() < 1e6 else 1.0
        return self.inner(x) * scale


BY_DATA = [partial(nn.Embedding, CLASSES, 8), Chosen, Chosen, Measured]
SHAPES = [
    Shape([(4, 8), (4, 8)]),
    Shape([(5, 16), (3, 4)]),
    Shape([(2, 8), (0, 4)], evaluates=True),
    Shape([(2, 8), (6, 8)]),
]


MOE = MoEGPTOptions(hidden=8, depth=2, heads=2, experts=4, balance=0, z=0)
GPT, EXPERTS = small_gpt(), moe_gpt(DataSpec(input_shape=(LONGEST,), num_classes=CLASSES), MOE)
LONG = [Shape([(12, 8)]), Shape([(6, 8)]), Shape([(6, 4)]), *ONE]
RUNS: list[tuple[dict[str, Any], Blocks, list[Shape]]] = [
    *(({"schedule": name, "mesh": "pp=2"}, GPT, ONE) for name in ("zb-h1", "zbv", "dualpipe", "dualpipe-v")),
    ({"schedule": "interleaved-1f1b", "mesh": "pp=2", "chunks": 2}, GPT, ONE),
    ({"schedule": "seq-1f1b", "mesh": "pp=2", "slices": 2}, GPT, ONE),
    ({"schedule": "gpipe", "mesh": "pp=2", "recompute": 1}, GPT, ONE),
    ({"mesh": "pp=4"}, GPT, ONE),
    ({"schedule": "dualpipe-v", "mesh": "pp=2,tp=2", "microbatches": 6, "overlap": True}, GPT, LONG),
    ({"mesh": "pp=4", "microbatches": 6, "offload": 3}, GPT, LONG),
    *(({"mesh": mesh, "zero": zero}, GPT, TWO) for mesh, zero in product(("dp=2", "dp=2,pp=2", "dp=2,tp=2"), range(4))),
    *(
        ({"mesh": mesh, "zero": zero}, BY_DATA, SHAPES)
        for mesh, zero in (("dp=2", 0), ("dp=2,pp=2", 0), ("dp=2,pp=4", 2))
    ),
    ({"mesh": "pp=2,ep=2"}, EXPERTS, TWO),
]
"""Requests of the compiler, blocks, and shapes of steps: of all replicas, of each, and such as data alone tell."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rules", ["nccl", "mailbox"])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: str(run[0]))
def test_steps_of_any_shape(run: tuple[dict[str, Any], Blocks, list[Shape]], rules: Rules) -> None:
    asked, blocks, shapes = run
    plan = qs.compile(**{"schedule": "1f1b", "microbatches": 4} | asked)
    require_equal(train_on(plan, blocks, shapes, rules, prove="all"), train_alone(blocks, shapes))


def test_a_shape_that_varies_with_data_is_refused_by_name() -> None:
    positive = of_layers("Positive", dict, lambda self, x: x[x.sum((1, 2)) > 0])
    plan, blocks = qs.compile("1f1b", mesh="pp=2", microbatches=2), [BY_DATA[0], positive, Measured, nn.Identity]
    with pytest.raises(qs.MisfitError, match=r"stage 0 .*Positive.* gave .*; the ranks agreed on .* must not depend"):
        train_ranks(plan, blocks, lambda x, _: x.sum(), sgd, batches(Shape([(8, 8)]), 0) * 3, dtype=torch.float64)


NUMBERED = [
    Shape([(4, 8)]),
    Shape([(6, 8)], microbatches=3),
    Shape([(6, 8)], microbatches=2),
    Shape([(5, 8)], microbatches=3, evaluates=True),
    Shape([(4, 8)]),
    Shape([(2, 4)], microbatches=3),
]


def edited(plan: qs.Plan) -> qs.Plan:
    """Return a plan that no schedule's name compiles to."""
    return replace(plan, schedule=ScheduleSpec("by-hand", plan.schedule.microbatches))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("name", ["zb-h1", "1f1b"])
def test_a_plan_is_compiled_again(name: str, zero: int, caplog: pytest.LogCaptureFixture) -> None:
    plan, blocks = qs.compile(name, mesh="pp=2", microbatches=4), small_gpt()
    with caplog.at_level(logging.INFO):
        require_equal(train_on(plan, blocks, NUMBERED), train_alone(blocks, NUMBERED))
    assert f"the plan ({name}) was compiled again for 3 microbatches" in caplog.text
    both = [Shape([(2, 8), (3, 8)], microbatches=k) for k in (3, 2, 6)]
    plan = qs.compile(name, mesh="dp=2", microbatches=4, zero=zero)
    require_equal(train_on(plan, blocks, both), train_alone(blocks, both))


def test_a_plan_of_ones_own_is_padded() -> None:
    plan, blocks = edited(qs.compile("1f1b", mesh="pp=2", microbatches=4)), small_gpt()
    require_equal(train_on(plan, blocks, NUMBERED), train_alone(blocks, NUMBERED))


def test_more_microbatches_than_a_plan_of_ones_own_has_are_refused() -> None:
    plan, (batch,) = edited(qs.compile("1f1b", mesh="pp=2", microbatches=2)), batches(NUMBERED[0], 0)

    def body(engine: Engine) -> None:
        with pytest.raises(qs.UsageError, match=r"has 2 microbatches, and it cannot be compiled again for 4"):
            engine.step(*batch, microbatches=4)
        assert torch.isfinite(engine.step(*batch).loss)

    run_engines(plan, small_gpt, body, cross_entropy_sum, sgd, dtype=torch.float64)
