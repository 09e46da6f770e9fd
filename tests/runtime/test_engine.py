"""The engine's promises besides equality: who holds what, what is refused, what a step reports."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime.blocks.block_builders import Blocks, build_block
from quintsched.runtime.blocks.block_costs import estimate_costs, measure_costs
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.engine import Engine
from quintsched.runtime.models.gpt import MoEGPTOptions, moe_gpt
from quintsched.runtime.train.built_in_losses import correct_sum, cross_entropy_sum

from ..helpers.training import Outcome, check_equality, require_same_bits, train_alone
from .toys import Task, difference, sgd, share, tiny_vit

TASK = Task.make(3, 8, torch.float64)


def engine_on(transport: Transport, plan: qs.Plan, blocks: Blocks, **options: object) -> Engine:
    settings: dict[str, object] = {"dtype": torch.float64} | options
    return Engine(plan, blocks, cross_entropy_sum, sgd, transport=transport, **settings)  # type: ignore[arg-type]


def vit_alone() -> Engine:
    return Engine(qs.compile("1f1b", mesh="pp=1", microbatches=2), tiny_vit(), cross_entropy_sum, sgd)


def test_every_rank_knows_loss_metrics_and_norm() -> None:
    plan = qs.compile("1f1b", mesh="dp=2,pp=2,tp=2", microbatches=2)

    def run(transport: Transport) -> tuple[float, float, float, float]:
        engine = engine_on(transport, plan, tiny_vit(), metrics={"accuracy": correct_sum})
        result = engine.step(*share(engine, TASK.inputs[0], TASK.targets[0]))
        assert result.grad_norm is not None
        return result.loss.item(), result.metrics["accuracy"].item(), result.weight.item(), result.grad_norm.item()

    alone = train_alone(tiny_vit(), cross_entropy_sum, sgd, TASK.batches[:1], clip=1e9, metric=correct_sum)
    (weight, accuracy), *_ = alone.figures
    for told in run_local(8, run):
        assert told == pytest.approx([alone.losses[0], accuracy, weight, alone.norms[0]], rel=1e-9)


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


class Extra(nn.Module):
    """Adds a learnt multiple of what each sample brings along."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.linear(x)) + bias
        return y, 0.1 * y.square().mean()


def test_extras_auxiliary_losses_and_plain_losses() -> None:
    plan = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2)
    random = torch.Generator().manual_seed(1)
    x, bias, y = (torch.randn(8, 6, generator=random, dtype=torch.float64) for _ in range(3))
    check_equality(plan, [Extra] * 4, F.mse_loss, sgd, [(x, y, {"bias": bias})])


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


def test_named_parameters_for_the_optimizer() -> None:
    def optimizer(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        decayed = [p for name, p in named_parameters if name.endswith("weight")]
        rest = [p for name, p in named_parameters if not name.endswith("weight")]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])

    engine = Engine(qs.compile("1f1b", mesh="pp=1", microbatches=2), tiny_vit(), cross_entropy_sum, optimizer)
    assert [len(group["params"]) > 0 for group in engine.optimizer.param_groups] == [True, True]
    assert torch.isfinite(engine.step(TASK.inputs[0].float(), TASK.targets[0]).loss)


def test_other_shapes_that_blocks_cannot_take_are_refused() -> None:
    engine = vit_alone()
    engine.step(TASK.inputs[0].float(), TASK.targets[0])
    engine.step(TASK.inputs[0][:3].float(), TASK.targets[0][:3])
    with pytest.raises(qs.MisfitError, match=r"block 0 cannot take float32 \(2, 1, 12, 12\)"):
        engine.step(torch.randn(4, 1, 12, 12), TASK.targets[0][:4])
    assert torch.isfinite(engine.step(TASK.inputs[0].float(), TASK.targets[0]).loss)


def test_a_loss_written_in_c() -> None:
    engine = Engine(qs.compile("1f1b", mesh="pp=1", microbatches=1), [lambda: nn.Linear(4, 4)], torch.dist, sgd)
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    assert engine.evaluate(x, y).loss.item() == pytest.approx(torch.dist(engine.stages[0].blocks["0"](x), y).item())


@pytest.mark.parametrize(
    ("mesh", "words"),
    [("tp=2", "block 1 is cut over tp already"), ("ep=2", "experts of block 1 are cut over ep already")],
)
def test_modules_that_another_engine_has_cut_are_refused(mesh: str, words: str) -> None:
    blocks = moe_gpt(DataSpec(input_shape=(8,), num_classes=9), MoEGPTOptions(hidden=8, depth=1, heads=2, experts=2))

    def run(transport: Transport) -> None:
        modules = [build_block(block, number) for number, block in enumerate(blocks)]
        plan = qs.compile("1f1b", mesh=mesh, microbatches=1)
        Engine(plan, modules, cross_entropy_sum, sgd, transport=transport)
        with pytest.raises(qs.MisfitError, match=words):
            Engine(plan, modules, cross_entropy_sum, sgd, transport=transport)

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


def test_state_survives_a_round_trip() -> None:
    plan = qs.compile("1f1b", mesh="pp=2,tp=2", microbatches=2)

    def run(transport: Transport) -> None:
        engine = engine_on(transport, plan, tiny_vit())
        steps = list(zip(TASK.inputs, TASK.targets, strict=True))
        engine.step(*steps[0])
        state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        engine.step(*steps[1])
        after = engine.full_weights()
        engine.load_state_dict(state)
        engine.step(*steps[1])
        assert all(torch.equal(weight, after[name]) for name, weight in engine.full_weights().items())
        with pytest.raises(qs.MisfitError, match=r"the state lacks .*bias"):
            engine.load_state_dict({name: tensor for name, tensor in state.items() if "bias" not in name})

    run_local(4, run)


def test_states_of_different_steps_are_refused_before_the_first_step() -> None:
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
    steps = list(zip(TASK.inputs, TASK.targets, strict=True))

    def run(transport: Transport) -> None:
        engine, other = (engine_on(transport, plan, tiny_vit()) for _ in range(2))
        states = []
        for step in steps[:2]:
            engine.step(*step)
            states.append({name: tensor.clone() for name, tensor in engine.state_dict().items()})
        other.load_state_dict(states[transport.rank])
        with pytest.raises(qs.MisfitError, match="how many steps the loaded state has behind it"):
            other.step(*steps[0])

    run_local(2, run)


def test_block_costs() -> None:
    blocks = [lambda: nn.Embedding(1000, 8), lambda: nn.Linear(8, 8), lambda: nn.Linear(8, 64)]
    assert estimate_costs(blocks) == [8.0, 72.0, 576.0]
    assert all(cost > 0 for cost in measure_costs(blocks, torch.zeros(4, dtype=torch.int64)))


def test_the_clock_has_the_time_of_computations_since_it_was_read() -> None:
    engine = vit_alone()
    engine.step(TASK.inputs[0].float(), TASK.targets[0])
    assert 0 < engine.clock.read_s() < 1000
    assert engine.clock.read_s() == 0


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


def test_evaluation_leaves_frozen_blocks_in_evaluation_mode() -> None:
    engine = vit_alone()
    first, second, *_ = engine.stages[0].blocks.values()
    second.eval()
    engine.evaluate(TASK.inputs[0].float(), TASK.targets[0])
    assert first.training
    assert not second.training


TWO, X = {"mesh": "pp=2", "microbatches": 2}, torch.ones(4, 4)
BROKEN = qs.compile("1f1b", **TWO)


@pytest.mark.parametrize(
    ("plan_of", "blocks", "batch", "error", "words"),
    [
        (
            lambda rank: qs.compile("1f1b" if rank else "gpipe", **TWO),
            tiny_vit(),
            TASK.batches[0],
            qs.MisfitError,
            "the ranks do not agree on the plan",
        ),
        (
            lambda rank: dataclasses.replace(BROKEN, programs=(BROKEN.programs[0][::-1], BROKEN.programs[1])),
            tiny_vit(),
            TASK.batches[0],
            qs.UnsoundError,
            "not sound",
        ),
        (
            lambda rank: qs.compile("1f1b", mesh="pp=4", microbatches=2),
            tiny_vit(depth=1),
            TASK.batches[0],
            qs.MisfitError,
            "3 blocks cannot fill 4 stages",
        ),
        (
            lambda rank: BROKEN,
            [lambda: nn.Linear(4, 6), lambda: nn.Linear(5, 3)],
            (X.double(), X.double()),
            qs.MisfitError,
            r"block 1 cannot take float64 \(2, 6\)",
        ),
        (
            lambda rank: qs.compile("1f1b", mesh="pp=1", microbatches=2),
            tiny_vit(),
            (TASK.inputs[0][:0], TASK.targets[0][:0]),
            qs.MisfitError,
            r"inputs of shape \(0, 1, 8, 8\) cannot be cut .* no samples",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    plan_of: Callable[[int], qs.Plan], blocks: Blocks, batch: tuple[Tensor, Tensor], error: type[Exception], words: str
) -> None:
    def run(transport: Transport) -> None:
        engine_on(transport, plan_of(transport.rank), blocks).step(*batch)

    with pytest.raises(error, match=words):
        run_local(plan_of(0).mesh.size, run)


def test_a_mesh_of_more_ranks_than_processes_is_refused() -> None:
    with pytest.raises(qs.MisfitError, match="mesh pp=2 has 2 ranks, but 1 process was"):
        Engine(BROKEN, tiny_vit(), cross_entropy_sum, sgd)
