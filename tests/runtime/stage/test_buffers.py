"""Buffers that forwards change are the same on all replicas: those of one process, or as the user says."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine, MoE
from quintsched.runtime.blocks.block_builders import Blocks
from quintsched.runtime.stage.merge_replica_buffers import buffers_kept

from ...helpers.blocks import of_layers
from ...helpers.training import (
    Outcome,
    Step,
    check_equality,
    random_batch,
    require_equal,
    squares,
    train_alone,
    train_ranks,
)
from ..toys import sgd

CHANNELS, SAMPLES, STEPS = 3, 8, 3
BATCHES = [random_batch(step, SAMPLES, CHANNELS, 6) for step in range(STEPS)]


def of_numbers(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    return squares(output, target)[0], float(output.numel())


def averaging() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1),
        nn.BatchNorm1d(CHANNELS),
        nn.Tanh(),
        nn.InstanceNorm1d(CHANNELS, affine=True, track_running_stats=True, momentum=0.2),
    )


def plainly(blocks: Blocks, size: int, order: Sequence[int] = range(SAMPLES)) -> Outcome:
    """Train in one process, `size` samples at a time."""
    batches = [tuple(part[[*order]] for part in batch) for batch in BATCHES]
    return train_alone(blocks, squares, sgd, batches, microbatches=SAMPLES // size)


def trained(plan: qs.Plan, blocks: Blocks, **options: Any) -> list[Outcome]:
    return train_ranks(plan, blocks, squares, sgd, BATCHES, dtype=torch.float64, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "request_of",
    [
        {"schedule": "zb-h1", "mesh": "dp=2,pp=2", "microbatches": 2, "recompute": 1},
        {"schedule": "1f1b", "mesh": "ep=2,dp=2", "microbatches": 1},
    ],
    ids=str,
)
def test_running_statistics_are_those_of_one_process(request_of: dict[str, Any]) -> None:
    blocks: Blocks = [averaging] * 4
    require_equal(trained(qs.compile(**request_of), blocks), plainly(blocks, 2))


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv1d(CHANNELS, CHANNELS, 1), nn.BatchNorm1d(CHANNELS), nn.Tanh())


@pytest.mark.parametrize("mesh", ["dp=2", "ep=2"])
def test_units_without_samples_change_no_statistics(mesh: str) -> None:
    """Over ep they are computed too, as experts may be given rows of other ranks; instance norms cannot be."""
    plan, blocks = qs.compile("1f1b", mesh=mesh, microbatches=3), [averaging if mesh == "dp=2" else normed] * 2
    steps = [Step([[part[:5] for part in batch], [part[6:] for part in batch]]) for batch in BATCHES[:2]]
    expected = train_alone(blocks, squares, sgd, steps, microbatches=3)
    require_equal(train_ranks(plan, blocks, squares, sgd, steps, dtype=torch.float64), expected)


def test_a_forward_without_samples_changes_buffers_of_experts_alone() -> None:
    """Experts are given rows of other ranks; a norm beside them has none to take statistics of."""
    mixture, beside = MoE(3, 2, lambda: nn.BatchNorm1d(3)), nn.BatchNorm1d(3)
    norms = [module for module in mixture.modules() if isinstance(module, nn.BatchNorm1d)] + [beside]
    with buffers_kept([mixture, beside], synced=False):
        for norm in norms:
            norm(torch.arange(6.0).view(2, 3))
    assert [int(norm.num_batches_tracked) for norm in norms] == [1, 1, 0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("zero", [0, 3])
def test_shared_statistics_are_those_of_the_union_of_microbatches(zero: int) -> None:
    plan = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2, zero=zero)
    blocks: Blocks = [normed] * 3
    expected = plainly(blocks, 4, order=[0, 1, 4, 5, 2, 3, 6, 7])
    require_equal(trained(plan, blocks, buffers="sync"), expected)
    synced: Blocks = [lambda: nn.SyncBatchNorm.convert_sync_batchnorm(normed())] * 3
    require_equal(trained(plan, synced), expected)


def test_the_first_replica_may_say_what_buffers_are() -> None:
    plan = qs.compile("1f1b", mesh="dp=2", microbatches=2)
    merged, first = trained(plan, [normed] * 2), trained(plan, [normed] * 2, buffers="first")
    for name, tensor in first[0].weights.items():
        assert torch.equal(tensor, first[1].weights[name])
        averages = "running" in name or "tracked" in name
        assert averages != torch.allclose(tensor.double(), merged[0].weights[name].double())


class Remembering(nn.Module):
    """Has a buffer that a forward changes; whether replicas differ in it is up to it."""

    def __init__(self, differs: bool) -> None:
        super().__init__()
        self.layer, self.differs = nn.Linear(6, 6), differs
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not x.is_meta:
            self.seen += x.detach().sum() if self.differs else 1.0
        return self.layer(x)  # type: ignore[no-any-return]


def test_other_buffers_have_to_be_the_same_or_are_those_of_the_first() -> None:
    plan = qs.compile("1f1b", mesh="dp=2", microbatches=2)
    counted = trained(plan, [lambda: Remembering(False)])
    assert [found.weights["0.seen"] for found in counted] == [2.0 * STEPS] * 2
    with pytest.raises(qs.MisfitError, match=r"the buffer '0.seen' changes in a forward, and replicas have different"):
        trained(plan, [lambda: Remembering(True)])
    one, other = trained(plan, [lambda: Remembering(True)], buffers="first")
    assert one.weights["0.seen"] == other.weights["0.seen"]
    with pytest.raises(qs.MisfitError, match=r"the buffer '0.seen' changes in a forward; .* buffers='first'"):
        trained(plan, [lambda: Remembering(False)], buffers="refuse")


Sequences = of_layers(
    "Sequences",
    lambda: {"layer": nn.Linear(6, 6), "norm": nn.BatchNorm1d(6)},
    lambda self, x, context=None: self.norm(self.layer(x).transpose(1, 2)).transpose(1, 2),
)
"""A batch norm over the features of all tokens (samples, tokens, features)."""


def test_slices_of_sequences_share_their_statistics() -> None:
    plan = qs.compile("1f1b", mesh="cp=2", microbatches=2)
    x, y = torch.randn(2, 4, 8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    check_equality(plan, [Sequences] * 2, of_numbers, sgd, [(x, y)] * 2, microbatches=2, buffers="sync")


@pytest.mark.parametrize("block", [nn.BatchNorm2d, nn.SyncBatchNorm])
def test_norms_keep_their_type_in_bf16(block: type[nn.Module]) -> None:
    def layers() -> dict[str, Any]:
        numbers = {"inv_freq": torch.rand(4), "turns": torch.rand(4, dtype=torch.complex64), "table": torch.rand(4)}
        return {"layer": nn.Conv2d(3, 3, 1), "norm": block(3)} | {n: nn.Buffer(of) for n, of in numbers.items()}

    rotary = of_layers("Rotary", layers, lambda self, x: self.norm(self.layer(x)))
    plan = qs.compile("1f1b", mesh="dp=1", microbatches=2)
    engine = Engine(plan, [rotary], squares, sgd, dtype=torch.bfloat16)
    engine.step(torch.randn(4, 3, 2, 2), torch.randn(4, 3, 2, 2))
    types = {name: tensor.dtype for name, tensor in engine.stages[0].blocks["0"].state_dict().items()}
    kept = {name for name, dtype in types.items() if dtype not in (torch.bfloat16, torch.int64)}
    stays = {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "inv_freq", "turns"}
    assert kept == stays
    assert types["table"] == types["layer.weight"] == torch.bfloat16
