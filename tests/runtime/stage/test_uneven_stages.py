"""Stages of as many blocks as the plan says, also of none: the engine equals one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Carry, Engine
from quintsched.runtime.blocks.block_outlines import build_model
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.models.gpt import GPTOptions, gpt_tied
from quintsched.runtime.train.summed_losses import cross_entropy_sum

from ..toys import adam, difference, ids_task, sgd, share, tiny_gpt, train_on, train_plainly, worst_difference

DEPTH = 4
LENGTH = 8

EVERY_SCHEDULE = [
    ("1f1b", 4, 4, [0, 0, 1, 2, 3, 3], [1, 2, 0, 2, 1, 0]),
    ("gpipe", 3, 3, [0, 1, 1, 2], [1, 3, 2, 0]),
    ("eager-1f1b", 2, 4, [0, 0, 1], [1, 4, 1]),
    ("bfs", 2, 4, [0, 1, 0], [1, 5, 0]),
    ("interleaved-1f1b", 2, 4, [0, 0, 1, 0, 1, 1], [1, 1, 1, 1, 2, 0]),
    ("interleaved-1f1b", 4, 4, [0, 1, 2, 3, 0, 1, 2], [1, 1, 1, 1, 0, 1, 1]),
    ("interleaved-zb", 2, 4, [0, 1, 0], [1, 5, 0]),
    ("zb-h1", 3, 4, [0, 1, 1, 2], [2, 0, 3, 1]),
    ("zb-h2", 2, 4, [0, 1, 1], [3, 3, 0]),
    ("zb-auto", 2, 4, [0, 0, 1], [1, 2, 3]),
    ("zbv", 2, 4, [0, 0, 1, 1, 1, 0], [1, 1, 0, 2, 2, 0]),
    ("zbv", 3, 6, [0, 1, 2, 1, 0], [1, 1, 2, 1, 1]),
    ("v-half", 2, 4, [0, 1, 1, 0, 0], [1, 2, 0, 2, 1]),
    ("v-min", 2, 4, [0, 1, 0], [2, 4, 0]),
    ("dualpipe", 2, 4, [0, 0, 1, 1, 1, 0], [1, 3, 2, 1, 3, 2]),
    ("dualpipe", 2, 4, None, [6, 0, 6, 0]),
    ("dualpipe-v", 2, 4, [0, 1, 1, 0, 0], [1, 2, 2, 1, 0]),
    ("seq-1f1b", 3, 3, None, [3, 0, 3]),
]


def require_equality(plan: qs.Plan, *, tied: bool = False, **more: Any) -> None:
    """Require of every rank that it ends with the losses and weights of one process."""
    microbatches = plan.schedule.microbatches * plan.mesh.axis_size("dp")
    task, blocks = ids_task(2, 2 * microbatches, LENGTH), tiny_gpt(LENGTH, depth=DEPTH, tied=tied)
    names = gpt_tied(GPTOptions(depth=DEPTH, tied=tied))
    expected = train_plainly(task, blocks, microbatches, clip=0.5, dtype=torch.float64, tied=names)
    for first, *others in names.values():
        expected.weights.update(dict.fromkeys(others, expected.weights[first]))
    found = train_on(plan, task, blocks, clip=0.5, dtype=torch.float64, tied=names, **more)
    assert worst_difference(found, expected) <= 1e-12


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("schedule", "pp", "microbatches", "where", "blocks"), EVERY_SCHEDULE)
def test_every_schedule_equals_one_process(
    schedule: str, pp: int, microbatches: int, where: list[int] | None, blocks: list[int]
) -> None:
    slices = 2 if schedule == "seq-1f1b" else 1
    shape: dict[str, Any] = {"mesh": {"pp": pp}, "microbatches": microbatches, "slices": slices}
    require_equality(qs.compile(schedule, **shape, stage_to_pp=where, stages=blocks), rules="nccl")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("schedule", "mesh", "microbatches", "where", "blocks"),
    [
        ("dualpipe-v", "pp=2", 4, [0, 0, 1, 1, 1, 0], [1, 1, 0, 2, 2, 0]),
        ("interleaved-1f1b", "pp=2,tp=2", 4, [0, 0, 1, 0, 1], [1, 2, 1, 2, 0]),
        ("dualpipe", "pp=2,tp=2", 4, [0, 0, 1, 1, 1, 0], [1, 5, 0, 1, 5, 0]),
    ],
)
def test_overlaps_on_uneven_stages_equal_one_process(
    schedule: str, mesh: str, microbatches: int, where: list[int], blocks: list[int]
) -> None:
    shape: dict[str, Any] = {"mesh": mesh, "microbatches": microbatches, "overlap": True}
    require_equality(qs.compile(schedule, **shape, stage_to_pp=where, stages=blocks))


LOSS_ALONE, EMPTY_MIDDLE, EMBEDDING_ALONE = [5, 1, 0], [4, 0, 2], [1, 3, 2]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("blocks", [LOSS_ALONE, EMPTY_MIDDLE, EMBEDDING_ALONE])
@pytest.mark.parametrize(
    ("schedule", "mesh", "settings", "engine"),
    [
        ("1f1b", "pp=3", {"recompute": 1}, {}),
        ("zb-h1", "pp=3", {"recompute": 2}, {}),
        ("1f1b", "dp=2,pp=3", {"zero": 1, "buckets_per_stage": 2}, {}),
        ("zb-h1", "dp=2,pp=3", {"zero": 3}, {}),
        ("1f1b", "dp=2,pp=3", {"zero": 2, "recompute": 1, "communication": "ring"}, {}),
        ("1f1b", "tp=2,pp=3", {}, {}),
        ("zb-h1", "pp=3,tp=2", {}, {"sequence_parallel": True}),
        ("1f1b", "cp=2,pp=3", {}, {}),
    ],
)
def test_all_that_a_plan_can_have_equals_one_process(
    schedule: str, mesh: str, settings: dict[str, Any], engine: dict[str, Any], blocks: list[int]
) -> None:
    if settings.get("recompute") == 2:  # every second block, of stages that have two
        settings = {"recompute": tuple(2 if count > 1 else 1 for count in blocks)}
    require_equality(qs.compile(schedule, mesh=mesh, microbatches=3, stages=blocks, **settings), **engine)


@pytest.mark.parametrize(
    ("schedule", "pp", "where", "blocks"),
    [
        ("1f1b", 3, None, [3, 0, 3]),
        ("1f1b", 3, None, [1, 5, 0]),
        ("zbv", 2, [0, 0, 1, 1, 1, 0], [1, 1, 0, 2, 2, 0]),
        ("1f1b", 2, None, [6, 0]),
    ],
)
def test_tied_weights_on_uneven_stages_equal_one_process(
    schedule: str, pp: int, where: list[int] | None, blocks: list[int]
) -> None:
    last = max(stage for stage, count in enumerate(blocks) if count)
    ties = {"embedding": (0, last)} if last else {}
    shape: dict[str, Any] = {"mesh": {"pp": pp}, "microbatches": 4}
    require_equality(qs.compile(schedule, **shape, stage_to_pp=where, stages=blocks, tied=ties), tied=True)


def test_every_rank_holds_the_blocks_that_the_plan_gives_it() -> None:
    plan = qs.compile("zbv", mesh="pp=2", microbatches=2, stage_to_pp=[0, 0, 1, 1, 0], stages=[1, 2, 0, 3, 0])

    def run(transport: Transport) -> dict[int, list[str]]:
        engine = Engine(plan, tiny_gpt(LENGTH, depth=DEPTH), cross_entropy_sum, sgd, transport=transport)
        return {number: [*stage.blocks] for number, stage in engine.stages.items()}

    first, second = run_local(2, run)
    assert first == {0: ["0"], 1: ["1", "2"], 4: []}
    assert second == {2: [], 3: ["3", "4", "5"]}


@pytest.mark.parametrize(
    ("schedule", "mesh", "where", "blocks"),
    [("zbv", "pp=2", [0, 0, 1, 1, 0], [1, 2, 0, 3, 0]), ("1f1b", "tp=2,pp=2", None, [6, 0])],
)
def test_evaluation_equals_one_process(schedule: str, mesh: str, where: list[int] | None, blocks: list[int]) -> None:
    plan = qs.compile(schedule, mesh=mesh, microbatches=2, stage_to_pp=where, stages=blocks)
    task, model = ids_task(1, 4, LENGTH), tiny_gpt(LENGTH, depth=DEPTH)

    def run(transport: Transport) -> float:
        engine = Engine(plan, model, cross_entropy_sum, sgd, dtype=torch.float64, transport=transport)
        return engine.evaluate(*share(engine, task.inputs[0], task.targets[0])).loss.item()

    total, weight = cross_entropy_sum(build_model(model, 0, torch.float64)(task.inputs[0]), task.targets[0])
    for loss in run_local(plan.mesh.size, run):
        assert loss == pytest.approx(float(total.detach() / weight), abs=1e-12)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_state_is_saved_and_loaded_with_ranks_that_hold_nothing(zero: int) -> None:
    plan = qs.compile("1f1b", mesh="dp=2,pp=3", microbatches=2, stages=[4, 0, 2], zero=zero)
    task, model = ids_task(4, 8, LENGTH), tiny_gpt(LENGTH, depth=DEPTH)

    def run(transport: Transport) -> tuple[list[float], list[float], int]:
        engine = Engine(plan, model, cross_entropy_sum, adam, dtype=torch.float64, transport=transport)
        losses, kept = [], {}
        for step, (inputs, targets) in enumerate(zip(task.inputs, task.targets, strict=True)):
            if step == 2:
                kept = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
            losses.append(engine.step(*share(engine, inputs, targets)).loss.item())
        engine.load_state_dict(kept)
        again = [
            engine.step(*share(engine, inputs, targets)).loss.item()
            for inputs, targets in zip(task.inputs[2:], task.targets[2:], strict=True)
        ]
        return losses[2:], again, len(kept)

    found = run_local(6, run)
    assert all(losses == again for losses, again, _ in found)
    assert sorted(size == 1 for _, _, size in found) == [False] * 4 + [True] * 2


class Down(nn.Linear):
    def forward(self, x: Tensor) -> Carry:
        return Carry(super().forward(x), skip=x)


class Up(nn.Linear):
    def forward(self, x: Tensor, skip: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + skip


@pytest.mark.parametrize("recompute", [0, 1])
def test_what_rides_along_passes_a_stage_without_blocks(recompute: int) -> None:
    builders: Sequence[Any] = [lambda: Down(4, 4), lambda: nn.Linear(4, 4), lambda: Up(4, 4)]
    inputs, targets = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plan = qs.compile("1f1b", mesh="pp=4", microbatches=3, stages=[1, 0, 2, 0], recompute=recompute)

    def run(transport: Transport) -> tuple[float, dict[str, Tensor]]:
        engine = Engine(plan, builders, nn.functional.mse_loss, sgd, dtype=torch.float64, transport=transport)
        return engine.step(inputs, targets).loss.item(), engine.full_weights()

    down, middle, up = build_model(builders, 0, torch.float64)
    carried = down(inputs)
    loss = nn.functional.mse_loss(up(middle(carried.output), **carried.riders), targets)
    loss.backward()
    model = nn.ModuleList([down, middle, up])
    sgd(list(model.parameters())).step()
    expected = dict(model.named_parameters())
    for found, weights in run_local(4, run):
        assert found == pytest.approx(loss.item(), abs=1e-12)
        assert all(difference(weight, expected[name].detach()) <= 1e-12 for name, weight in weights.items())


@pytest.mark.parametrize(
    ("schedule", "blocks", "words"),
    [
        ("1f1b", [3, 4], r"stages have 3,4 blocks, 7 of a model, but the model has 6; .* like --stages 3,3\b"),
        ("1f1b", [3, 2], r"stages have 3,2 blocks, 5 of a model, but the model has 6; "),
        ("dualpipe", [4, 3, 4, 3], r"4,3,4,3 blocks, 7 of a model, but the model has 6; .* like --stages 3,3,3,3\b"),
    ],
)
def test_blocks_that_are_not_those_of_the_model_are_refused(schedule: str, blocks: list[int], words: str) -> None:
    plan = qs.compile(schedule, mesh="pp=2", microbatches=4, stages=blocks)
    with pytest.raises(qs.MisfitError, match=words):
        train_on(plan, ids_task(1, 4, LENGTH), tiny_gpt(LENGTH, depth=DEPTH), dtype=torch.float64)


def test_costs_of_blocks_and_planned_stages_are_refused_together() -> None:
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2, stages=[4, 2])
    with pytest.raises(qs.UsageError, match=r"how many blocks each stage has \(4,2\).*leave out block_costs"):
        train_on(plan, ids_task(1, 4, LENGTH), tiny_gpt(LENGTH, depth=DEPTH), block_costs=[1.0] * 6)


def test_modules_on_uneven_stages_may_not_share_a_weight() -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    plan = qs.compile("1f1b", mesh="pp=4", microbatches=1, stages=[1, 0, 0, 1])

    def run(transport: Transport) -> None:
        Engine(plan, [first, last], nn.functional.mse_loss, sgd, transport=transport)

    with pytest.raises(qs.MisfitError, match=r"blocks 0 and 1 share .* \(they are on stages 0 and 3\)"):
        run_local(4, run)
