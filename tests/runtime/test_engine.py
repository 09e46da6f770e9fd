"""The engine's promises besides equality: who holds what, what is refused, what a step reports."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import split
from quintsched.runtime.blocks.block_builders import Blocks
from quintsched.runtime.blocks.block_costs import estimate_costs, measure_costs
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.engine import Engine
from quintsched.runtime.train.built_in_losses import correct_sum, cross_entropy_sum

from ..helpers.training import Outcome, require_same_bits
from .toys import Task, difference, sgd, share, tiny_vit

TASK = Task.make(3, 8, torch.float64)


def engine_on(transport: Transport, plan: qs.Plan, blocks: Blocks, **options: object) -> Engine:
    settings: dict[str, object] = {"dtype": torch.float64} | options
    return Engine(plan, blocks, cross_entropy_sum, sgd, transport=transport, **settings)  # type: ignore[arg-type]


def test_evaluation_leaves_the_training_alone() -> None:
    plan = qs.compile("interleaved-1f1b", mesh="pp=2,dp=2", microbatches=2)

    def run(transport: Transport) -> None:
        engine = engine_on(transport, plan, tiny_vit(), metrics={"accuracy": correct_sum})
        before = engine.full_weights()
        with torch.inference_mode():  # whose tensors count no versions
            first = engine.evaluate(*share(engine, TASK.inputs[0] * 1, TASK.targets[0]))
        again = engine.evaluate(*share(engine, TASK.inputs[0], TASK.targets[0]))
        assert first.loss == again.loss
        assert first.grad_norm is None
        assert all(torch.equal(weight, before[name]) for name, weight in engine.full_weights().items())
        trained = engine.step(*share(engine, TASK.inputs[0], TASK.targets[0]))
        assert difference(trained.loss, first.loss) < 1e-12

    run_local(4, run)


def test_no_rank_holds_more_than_one_full_block_nor_builds_those_of_others() -> None:
    plan = qs.compile("1f1b", mesh="pp=2,tp=2", microbatches=2)
    built: dict[str, list[int]] = {}
    alive: dict[str, list[weakref.ref[nn.Parameter]]] = {}

    def run(transport: Transport) -> None:
        rank = f"rank{transport.rank}"
        built[rank], alive[rank] = [], []

        def watched(number: int, build: Callable[[], nn.Module]) -> nn.Module:
            module = build()
            if next(module.parameters()).is_meta:
                return module
            gc.collect()
            still = [ref() for ref in alive[rank] if ref() is not None]
            assert not still, f"block {number} is built while a full weight of another still stands"
            built[rank].append(number)
            alive[rank] += [
                weakref.ref(layer.weight)
                for name, layer in module.named_modules()
                if name.endswith(("qkv", "fc1", "fc2")) and isinstance(layer, nn.Linear)
            ]
            return module

        blocks = [lambda n=n, b=b: watched(n, b) for n, b in enumerate(tiny_vit())]  # type: ignore[misc]
        engine_on(transport, plan, blocks).step(TASK.inputs[0], TASK.targets[0])

    gc.collect()
    gc.freeze()  # what earlier tests have left need not be looked through at every block
    try:
        run_local(4, run)
    finally:
        gc.unfreeze()
    assert built["rank0"] == built["rank1"]
    assert built["rank0"] + built["rank2"] == list(range(6))


@pytest.mark.parametrize("is_emptied", [False, True])
def test_a_list_of_blocks_that_is_changed_later_is_refused_but_may_be_emptied(is_emptied: bool) -> None:
    plan, x = qs.compile("1f1b", mesh="pp=2", microbatches=2), torch.ones(4, 3)

    def run(transport: Transport) -> None:
        blocks = [nn.Linear(3, 3) for _ in range(3)]
        engine = Engine(plan, blocks, F.mse_loss, lambda w: torch.optim.SGD(w, lr=0.1), transport=transport)
        engine.step(x, x)
        blocks[:] = [] if is_emptied else reversed(blocks)
        engine.step(x, x)

    with nullcontext() if is_emptied else pytest.raises(MisfitError, match=r"list of blocks .* changed at place 0"):
        run_local(2, run)


def test_an_error_inside_a_step_names_the_instruction() -> None:
    class Bomb(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not x.is_meta and x.sum() > 50:
                raise ValueError("the bomb went off")
            return super().forward(x)

    def run(transport: Transport) -> None:
        blocks = [lambda: nn.Identity(), lambda: Bomb(4, 4)]
        plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
        engine = Engine(plan, blocks, nn.functional.mse_loss, sgd, transport=transport)
        x = torch.cat([torch.zeros(2, 4), torch.full((2, 4), 100.0)])
        engine.step(x, torch.ones(4, 4))

    with pytest.raises(qs.MisfitError, match=r"stage 1, block 1 \(Bomb\): ValueError: the bomb went off") as caught:
        run_local(2, run)
    assert isinstance(caught.value.__cause__, ValueError)
    assert any("on rank 1 (pp=1), instruction" in note and "microbatch=1" in note for note in caught.value.__notes__)


def test_after_a_step_that_failed_the_engine_refuses_to_go_on() -> None:
    def explode(output: Tensor, targets: Tensor) -> Tensor:
        if targets.sum() > 0:
            raise ValueError("no such target")
        return nn.functional.mse_loss(output, targets)

    engine = Engine(qs.compile("1f1b", mesh="pp=1", microbatches=2), [lambda: nn.Linear(2, 2)], explode, sgd)
    engine.step(torch.zeros(2, 2), torch.zeros(2, 2))
    with pytest.raises(qs.MisfitError, match="the loss function raised ValueError: no such target; it was given"):
        engine.step(torch.zeros(2, 2), torch.ones(2, 2))
    with pytest.raises(qs.UsageError, match="an earlier step failed half-way"):
        engine.step(torch.zeros(2, 2), torch.zeros(2, 2))


TWO, X = {"mesh": "pp=2", "microbatches": 2}, torch.ones(4, 4)
BROKEN = qs.compile("1f1b", **TWO)


Plans = Callable[[int], qs.Plan]
IMAGES: tuple[Blocks, tuple[Tensor, Tensor]] = (tiny_vit(depth=1), TASK.batches[0])
UNFIT: tuple[Blocks, tuple[Tensor, Tensor]] = (
    [lambda: nn.Linear(4, 6), lambda: nn.Linear(5, 3)],
    (X.double(), X.double()),
)
EMPTY: tuple[Blocks, tuple[Tensor, Tensor]] = (tiny_vit(), (TASK.inputs[0][:0], TASK.targets[0][:0]))
BACKWARDS = dataclasses.replace(BROKEN, programs=(BROKEN.programs[0][::-1], BROKEN.programs[1]))
REFUSED: list[tuple[Plans, tuple[Blocks, tuple[Tensor, Tensor]], type[Exception], str]] = [
    (lambda rank: qs.compile("1f1b" if rank else "gpipe", **TWO), IMAGES, MisfitError, "do not agree on the plan"),
    (lambda rank: BACKWARDS, IMAGES, qs.UnsoundError, "not sound"),
    (lambda rank: qs.compile("1f1b", mesh="pp=4", microbatches=2), IMAGES, MisfitError, "3 blocks cannot fill 4"),
    (lambda rank: BROKEN, UNFIT, MisfitError, r"block 1 cannot take float64 \(2, 6\)"),
    (
        lambda rank: qs.compile("1f1b", mesh="pp=1", microbatches=2),
        EMPTY,
        MisfitError,
        r"inputs of shape \(0, 1, 8, 8\) cannot be cut .* no samples",
    ),
]


@pytest.mark.parametrize(("plan_of", "given", "error", "words"), REFUSED)
def test_what_does_not_fit_is_refused(plan_of: Plans, given: Any, error: type[Exception], words: str) -> None:
    blocks, batch = given

    def run(transport: Transport) -> None:
        engine_on(transport, plan_of(transport.rank), blocks).step(*batch)

    with pytest.raises(error, match=words):
        run_local(plan_of(0).mesh.size, run)


def test_a_mesh_of_more_ranks_than_processes_is_refused() -> None:
    with pytest.raises(qs.MisfitError, match="mesh pp=2 has 2 ranks, but 1 process was"):
        Engine(BROKEN, tiny_vit(), cross_entropy_sum, sgd)


def test_one_line_each() -> None:
    plan = qs.compile("1f1b", mesh="dp=1,pp=2", microbatches=2)
    inputs = torch.ones(4, 3)

    def rank(transport: Transport) -> list[str]:
        blocks = [lambda: nn.Linear(3, 3)] * 3
        metrics = {"largest": lambda output, targets: ((output > 9).sum(), output.numel())}
        engine = Engine(plan, blocks, nn.MSELoss(), torch.optim.SGD, metrics=metrics, transport=transport)
        return [repr(engine), *map(repr, (engine.step(inputs, inputs), engine.evaluate(inputs, inputs)))]

    (first, step, evaluation), (last, *same) = run_local(2, rank)
    assert first == "Engine(1f1b on dp=1,pp=2, 2 microbatches; rank 0 of 2 (dp=0, pp=0): stage 0 of 2 blocks)"
    assert last.endswith("; rank 1 of 2 (dp=0, pp=1): stage 1 of 1 block)")
    assert step.startswith("StepResult(loss=")
    assert ", weight=12, grad_norm=" in step
    assert ", largest=" in step
    assert "grad_norm" not in evaluation
    assert same == [step, evaluation]


def test_blocks_of_a_split_model_by_their_classes() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))
    assert repr(split(model)) == "Split(4 blocks: Linear, ReLU, 2 x Linear)"


def test_states_of_different_steps_are_refused_before_the_first_step() -> None:
    def run(transport: Transport) -> None:
        engine, other = (engine_on(transport, BROKEN, tiny_vit()) for _ in range(2))
        engine.step(*TASK.batches[0])
        state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        state["engine.step"] += transport.rank
        other.load_state_dict(state)
        with pytest.raises(MisfitError, match="how many steps the loaded state has behind it"):
            other.step(*TASK.batches[0])

    run_local(2, run)


def plain(**settings: Any) -> Engine:
    plan = qs.compile("1f1b", mesh="pp=1", microbatches=2)
    return Engine(plan, [lambda: nn.Linear(4, 4)], F.mse_loss, sgd, **settings)


def marked() -> Any:
    inputs: Any = X.clone()
    inputs.level = 2
    return inputs


CALLS: list[tuple[Callable[[Engine], object], type[Exception], str]] = [
    (lambda engine: (engine.close(), engine.step(X, X)), qs.UsageError, "this engine was closed; make a new one"),
    (lambda engine: engine.evaluate(X, None), qs.UsageError, "needs targets"),
    (lambda engine: engine.step(marked(), X), MisfitError, "inputs has an attribute 'level'.*engine.step"),
    (lambda engine: engine.step(X, X[:3]), MisfitError, r"targets of shape \(3, 4\) .*: there are 4 samples"),
    (lambda engine: plain(grad_scaler=2.0), qs.UsageError, "grad_scaler is a float"),
]


@pytest.mark.parametrize(("call", "error", "words"), CALLS)
def test_calls_that_do_not_fit_are_refused(call: Any, error: type[Exception], words: str) -> None:
    engine = plain()
    with pytest.raises(error, match=words):
        call(engine)


def test_modules_built_by_the_user_start_alike_everywhere() -> None:
    plan = qs.compile("1f1b", mesh="dp=2,tp=2", microbatches=2)

    def run(transport: Transport) -> Outcome:
        blocks = [build() for build in tiny_vit()]
        with torch.no_grad():
            for weight in nn.ModuleList(blocks).parameters():
                weight.add_(transport.rank)
        return Outcome([], engine_on(transport, plan, blocks).full_weights())

    first, *others = run_local(4, run)
    require_same_bits(others, first)


def test_a_loss_written_in_c() -> None:
    engine = Engine(qs.compile("1f1b", mesh="pp=1", microbatches=1), [lambda: nn.Linear(4, 4)], torch.dist, sgd)
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    assert engine.evaluate(x, y).loss.item() == pytest.approx(torch.dist(engine.stages[0].blocks["0"](x), y).item())


def test_block_costs() -> None:
    blocks = [lambda: nn.Embedding(1000, 8), lambda: nn.Linear(8, 8), lambda: nn.Linear(8, 64)]
    assert estimate_costs(blocks) == [8.0, 72.0, 576.0]
    assert all(cost > 0 for cost in measure_costs(blocks, torch.zeros(4, dtype=torch.int64)))
