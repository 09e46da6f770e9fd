"""The engine's promises besides equality: impossible runs that are refused, proofs made once, what a step reports."""

import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.ir import instruction_set as ins
from quintsched.runtime import Engine, Transport, run_local
from quintsched.runtime.train.built_in_losses import cross_entropy_sum
from quintsched.verify import soundness

from ..helpers.training import Outcome, check_equality, require_same_bits
from .linear_blocks import batch, linear, squared_sum, train
from .toys import sgd, tiny_vit
from .trials import engine_of

PLAN = qs.compile("1f1b", mesh="pp=2", microbatches=2)


def test_after_a_step_that_failed_the_engine_refuses_to_go_on() -> None:
    def explode(output: Tensor, targets: Tensor) -> Tensor:
        if targets.sum() > 0:
            raise ValueError("no such target")
        return nn.functional.mse_loss(output, targets)

    engine = engine_of(None, [lambda: nn.Linear(2, 2)], explode, "pp=1")
    engine.step(torch.zeros(2, 2), torch.zeros(2, 2))
    with pytest.raises(qs.MisfitError, match="the loss function raised ValueError: no such target; it was given"):
        engine.step(torch.zeros(2, 2), torch.ones(2, 2))
    with pytest.raises(qs.UsageError, match="an earlier step failed half-way"):
        engine.step(torch.zeros(2, 2), torch.zeros(2, 2))


@pytest.mark.parametrize("is_emptied", [False, True])
def test_a_list_of_blocks_that_is_changed_later_is_refused_but_may_be_emptied(is_emptied: bool) -> None:
    x = torch.ones(4, 3)

    def run(transport: Transport) -> None:
        blocks = [nn.Linear(3, 3) for _ in range(3)]
        engine = engine_of(transport, blocks)
        engine.step(x, x)
        blocks[:] = [] if is_emptied else reversed(blocks)
        engine.step(x, x)

    with nullcontext() if is_emptied else pytest.raises(qs.MisfitError, match=r"list of blocks .* changed at place 0"):
        run_local(2, run)


def test_states_of_different_steps_are_refused_before_the_first_step() -> None:
    x = torch.ones(4, 3)

    def run(transport: Transport) -> None:
        engine, other = (engine_of(transport, [lambda: nn.Linear(3, 3)] * 2) for _ in range(2))
        engine.step(x, x)
        state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        state["engine.step"] += transport.rank
        other.load_state_dict(state)
        with pytest.raises(qs.MisfitError, match="how many steps the loaded state has behind it"):
            other.step(x, x)

    run_local(2, run)


def test_modules_built_by_the_user_start_alike_everywhere() -> None:
    def run(transport: Transport) -> Outcome:
        blocks = [build() for build in tiny_vit()]
        with torch.no_grad():
            for weight in nn.ModuleList(blocks).parameters():
                weight.add_(transport.rank)
        return Outcome([], engine_of(transport, blocks, cross_entropy_sum, "dp=2,tp=2").full_weights())

    first, *others = run_local(4, run)
    require_same_bits(others, first)


def test_a_send_that_a_host_never_comes_to_is_refused_where_order_is_identity() -> None:
    *last, send, metrics, clip, step = PLAN.programs[1]
    assert isinstance(send, ins.SendGrad)
    late = replace(PLAN, programs=(PLAN.programs[0], (*last, metrics, clip, send, step)))
    assert late.check(profile="tagged").sound
    losses = [outcome.losses for outcome in train(late, [linear] * 2, batch(4))]
    assert losses == [outcome.losses for outcome in train(PLAN, [linear] * 2, batch(4))]
    with pytest.raises(qs.UnsoundError, match=r"rank 1: 7 ShareMetrics\(\) must end before 9 SendGrad\(") as refusal:
        train(late, [linear] * 2, batch(4), wire="nccl")
    assert "'channel' 2 waits close a circle" in str(refusal.value)
    assert late.check(profile="channel").explain() == str(refusal.value), "a run says what the check says"


def test_a_plan_is_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    proved: list[str] = []

    def noted(plan: qs.Plan, *args: Any, **options: Any) -> soundness.Verdict:
        proved.append(plan.mode)
        return check(plan, *args, **options)

    plan, check = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2), soundness.check
    monkeypatch.setattr(soundness, "check", noted)
    losses = [outcome.losses for outcome in train(plan, [linear] * 2, batch(4))]
    assert losses == losses[:1] * 4
    assert proved.count("train") <= 4, "at most once for each rank"


def test_a_model_that_ties_weights_does_not_go_both_ways() -> None:
    plan = qs.compile("dualpipe", mesh="pp=2", microbatches=4)
    with pytest.raises(qs.MisfitError, match=r"ties weights \(w\), which a bidirectional schedule cannot"):
        train(plan, [linear] * 4, batch(8), tied={"w": ["0.weight", "3.weight"]})


@pytest.mark.parametrize(
    ("schedules", "error", "words"),
    [(("gpipe", "1f1b"), qs.MisfitError, "do not agree on the plan"), (("1f1b", "1f1b"), qs.UnsoundError, "not sound")],
)
def test_plans_that_ranks_do_not_share_or_that_are_not_sound_are_refused(schedules, error, words):
    plans = [qs.compile(name, mesh="pp=2", microbatches=2) for name in schedules]
    if error is qs.UnsoundError:
        plans = [replace(plan, programs=(plan.programs[0][::-1], plan.programs[1])) for plan in plans]

    def run(transport: Transport) -> None:
        Engine(plans[transport.rank], [linear] * 2, squared_sum, sgd, dtype=torch.float64, transport=transport).step(
            *batch(4)
        )

    with pytest.raises(error, match=words):
        run_local(2, run)


def test_a_stage_that_only_reshapes_does_not_send_from_a_receive_buffer() -> None:
    """The last stage is slow, so that the middle one has received again before its message is taken."""

    class Last(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0 if x.is_meta else 0.02)
            return super().forward(x.flatten(1))

    x, y = torch.randn(2, 16, 4)
    blocks, plan = (
        [nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), Last(4, 4)],
        qs.compile("gpipe", mesh="pp=3", microbatches=8),
    )
    told: dict[str, Any] = {"block_costs": [1, 1, 1], "wire": "rendezvous", "tolerance": 1e-6, "dtype": torch.float32}
    check_equality(plan, blocks, nn.functional.mse_loss, sgd, [(x, y)] * 2, evaluated=(x, y), **told)
    with pytest.raises(qs.UsageError, match="2 block_costs for 3 blocks"):
        engine_of(None, blocks, nn.functional.mse_loss, "pp=1", block_costs=[1, 1])
