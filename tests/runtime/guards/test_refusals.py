"""Each row of the table of refusals refuses what it is for, in the first voice, and nothing beside it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import quintsched as qs
from quintsched.ir.instruction_set import Bwd, Fwd
from quintsched.runtime.guards import refused_combinations
from quintsched.runtime.guards.refused_combinations import REFUSALS, BlockUse, require_usable_blocks
from quintsched.runtime.parallel.expert.moe import MoE
from quintsched.runtime.stage.build_stages import cuts_of
from quintsched.schedules import Order, Schedule, Shape

from ...helpers.blocks import of_kind
from ...helpers.training import sgd, train_ranks

WIDTH = 4
linear = partial(nn.Linear, WIDTH, WIDTH)


def norm() -> nn.Module:
    return nn.Sequential(linear(), nn.BatchNorm1d(WIDTH))


def lstm() -> nn.Module:
    return nn.LSTM(WIDTH, WIDTH, 2, dropout=0.1)


def own_norm() -> nn.Module:
    return nn.InstanceNorm1d(WIDTH, track_running_stats=True)


def mixture(*, drops: bool = False, balance: float = 0.0) -> nn.Module:
    return MoE(WIDTH, 2, lambda: nn.Sequential(linear(), nn.Dropout(0.1 if drops else 0.0)), balance=balance)


def look(self: Any, x: Tensor, past: Any = None, context: Any = None) -> Tensor:
    """Look beyond one's slice of a sequence."""
    return nn.Linear.forward(self, x)


def leave(self: Any, x: Tensor, targets: Tensor) -> Any:
    """Have a loss of one's own."""
    return x, (nn.Linear.forward(self, x) - targets).square().sum()


Looking, Exit = (partial(of_kind(nn.Linear, forward), WIDTH, WIDTH) for forward in (look, leave))


def backwards(rank: int, shape: Shape) -> Order:
    """Return GPipe's order, from the last microbatch to the first."""
    return [kind(rank, m) for kind in (Fwd, Bwd) for m in reversed(range(shape.microbatches))]


BACKWARDS = Schedule("backwards", backwards, "", "", "")


@dataclass(frozen=True)
class Case:
    """Blocks and their use, which one row refuses."""

    words: str
    blocks: list[Callable[[], nn.Module]]
    mesh: str = "pp=2"
    schedule: str | Schedule = "1f1b"
    more: dict[str, Any] = field(default_factory=dict)
    buffers: Any = "merge"
    device: str = "cpu"
    error: type[Exception] = qs.MisfitError
    is_sliced: bool = False
    cuda_graph: bool = False


SLICED: dict[str, Any] = {"schedule": "seq-1f1b", "more": {"slices": 2}}
OVERLAP: dict[str, Any] = {"mesh": "dp=2,pp=2", "schedule": "dualpipe-v", "more": {"overlap": True}, "buffers": "sync"}
CASES: tuple[Case, ...] = (
    Case("seq-1f1b cuts sequences into 2 slices, but no block takes `past`", [linear] * 2, **SLICED),
    Case("mesh pp=2,cp=2 cuts sequences over cp, but no block takes `context`", [linear] * 2, "pp=2,cp=2"),
    Case("one of 3 blocks of stage 0 is to be recomputed, but it has 2; set", [linear] * 4, more={"recompute": 3}),
    Case("a block of stage 0 takes targets, but .* compile it with --losses 0,1$", [Exit, linear]),
    Case("block 1 takes targets, and sequence parallelism gives it a slice", [linear, Exit], is_sliced=True),
    Case(r"1\.1 \(BatchNorm1d\) averages .* and seq-1f1b gives it slices", [Looking, norm], **SLICED),
    Case(r"1\.1 \(BatchNorm1d\) averages .* and sequence_parallel gives", [linear, norm], is_sliced=True),
    Case(r"1 \(InstanceNorm1d\) averages .* and mesh pp=2,cp=2", [Looking, own_norm], "pp=2,cp=2", buffers="sync"),
    Case(r"1\.1 \(BatchNorm1d\) averages .* and mesh pp=2,cp=2 .* buffers='sync'", [Looking, norm], "pp=2,cp=2"),
    Case(r"0\.1 \(BatchNorm1d\) has running statistics, and dualpipe", [norm, linear] * 2, schedule="dualpipe"),
    Case(r"1\.1 \(BatchNorm1d\) .* each microbatch in turn, and backwards runs", [linear, norm], schedule=BACKWARDS),
    Case(r"the buffer '0\.1' changes in every forward", [norm, linear], "dp=2,pp=2", buffers="refuse"),
    Case("dualpipe-v lets a forward and a backward overlap, in which batch norms", [norm, *[linear] * 3], **OVERLAP),
    Case("block 1 has a dropout within the experts of 'itself'", [linear, lambda: mixture(drops=True)]),
    Case("block 1 balances the experts of 'itself' .* balance=0", [Looking, lambda: mixture(balance=0.1)], **SLICED),
    Case(r"block 1 drops out by a LSTM \(itself\), whose masks would not agree over", [linear, lstm], device="cuda"),
    Case("PyTorch has sharded modules of stage 0, whose activations", [linear] * 2, more={"offload": 1}),
    Case(r"PyTorch has sharded block 0 \(DTensor\), whose weights ZeRO-1", [linear] * 2, "dp=2,pp=2", more={"zero": 1}),
    Case("blocks draw random numbers", [linear, lambda: nn.Dropout(0.1)], error=qs.UsageError, cuda_graph=True),
    Case("the mixture of experts itself asks", [linear, mixture], error=qs.UsageError, cuda_graph=True),
)
"""One for each row, in the same order."""


def run_of(case: Case) -> BlockUse:
    """Return what a case asks about."""
    plan = qs.compile(case.schedule, mesh=case.mesh, microbatches=4, **case.more)
    blocks = [block() for block in case.blocks]
    cuts = cuts_of(plan, blocks, None)
    return BlockUse(
        plan, torch.device(case.device), blocks, cuts, lambda number: case.is_sliced, case.buffers, case.cuda_graph
    )


def test_losses_before_the_last_stage_want_one_route() -> None:
    with pytest.raises(qs.MisfitError, match="dualpipe has a loss on last stages alone; take a schedule with one"):
        require_usable_blocks(run_of(Case("", [Exit, linear], schedule="dualpipe")))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda self, x: setattr(self, "calls", x), "stage 0 for microbatches 1, 0: one process would"),
        (lambda self, x: self.weight._version and setattr(self, "late", x), "late: .* stage 0 for microbatches 1, 0"),
        (lambda self, x: self.bias.detach().add_(x.detach().mean()), "its weight 'bias' .* another order"),
        (lambda self, x: self.training or setattr(self, "late", x), "late: .* stage 0 for microbatches 1, 0"),
    ],
)
def test_state_that_forwards_change_wants_microbatches_in_order(change: Callable[..., Any], words: str) -> None:
    kind = of_kind(nn.Linear, lambda self, x: (change(self, x), nn.Linear.forward(self, x))[1])
    plan, batch = qs.compile(BACKWARDS, mesh="pp=2", microbatches=2), (torch.ones(4, WIDTH),) * 2
    with pytest.raises(qs.MisfitError, match=words):
        train_ranks(plan, [linear, partial(kind, WIDTH, WIDTH)], mse_loss, sgd, [batch, batch], evaluated=batch)


@pytest.mark.parametrize("number", range(len(REFUSALS)))
def test_a_row_refuses_what_it_is_for(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, row = CASES[number], REFUSALS[number]
    if row.fact is refused_combinations.SHARDED:
        row = row._replace(fact=refused_combinations.ANY_BLOCK)
        monkeypatch.setattr(refused_combinations, "REFUSALS", (*REFUSALS[:number], row, *REFUSALS[number + 1 :]))
    with pytest.raises(case.error, match=case.words):
        require_usable_blocks(run_of(case))
    monkeypatch.setattr(refused_combinations, "REFUSALS", (*REFUSALS[:number], *REFUSALS[number + 1 :]))
    require_usable_blocks(run_of(case))


@pytest.mark.parametrize(
    "case",
    [
        Case("", [norm, linear] * 2, "dp=2,pp=2"),
        Case("", [norm, linear], "dp=2,pp=2", buffers="sync"),
        Case("", [Looking, norm], "pp=2,cp=2", buffers="sync"),
        Case("", [Looking, linear], **SLICED),
        Case("", [Exit, linear], more={"losses": [0, 1]}),
        Case("", [lambda: norm().eval(), linear] * 2, schedule="dualpipe"),
        Case("", [mixture, linear], "ep=2,pp=2"),
        Case("", [lstm, linear]),
        Case("", [linear, lambda: nn.Dropout(0.0)], cuda_graph=True),
    ],
)
def test_other_uses_of_the_same_blocks_are_no_matter(case: Case) -> None:
    require_usable_blocks(run_of(case))
