"""One rank on one GPU, without any message: the numbers of one process, and split backwards bit for bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import quintsched as qs
from quintsched.runtime.comm import LocalTransport, LocalWorld
from quintsched.runtime.engine import Engine
from quintsched.runtime.parallel.dropout import Masks, Unit, key_dropouts
from quintsched.runtime.train.losses import cross_entropy_sum
from tests.runtime.matrix import ONE_RANK, Case
from tests.runtime.toys import Outcome, ids_task, tiny_gpt, train_rank, worst_difference

from .sharing import wants_ranks

pytestmark = wants_ranks(1)

DEVICE = "cuda"
STEPS, SAMPLES, LENGTH = 5, 8, 16
SPLIT = [("zb-h1", 1), ("interleaved-zb", 2), ("zbv", 2), ("interleaved-1f1b", 2)]


def alone() -> LocalTransport:
    return LocalTransport(LocalWorld(1, device=DEVICE), 0)


def bf16_outcome(schedule: str, chunks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train in bf16; returns losses, and the float32 masters by name.

    The attention is that of plain products: the faster kernels add up in an order that changes from run to run.
    """
    engine = Engine(
        qs.compile(schedule, mesh="pp=1", microbatches=4, chunks=chunks),
        tiny_gpt(LENGTH),
        cross_entropy_sum,
        partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        dtype=torch.bfloat16,
        transport=alone(),
    )
    task = ids_task(STEPS, SAMPLES, LENGTH)
    with sdpa_kernel(SDPBackend.MATH):
        losses = [engine.step(*batch).loss.item() for batch in zip(task.inputs, task.targets, strict=True)]
    weights = {
        name: engine.masters.of(parameter).detach()
        for stage in engine.stages.values()
        for name, parameter in stage.named_weights().items()
    }
    return losses, weights


@pytest.mark.parametrize("case", ONE_RANK, ids=str)
def test_in_double_precision(case: Case) -> None:
    task = case.task(torch.float64)
    found = train_rank(alone(), case.plan, task, case.blocks, dtype=torch.float64, tied=case.tied)
    on_host = Outcome(found.losses, {name: weight.cpu() for name, weight in found.weights.items()})
    assert worst_difference([on_host], case.alone(torch.float64)) <= 1e-12


@pytest.mark.parametrize(("schedule", "chunks"), SPLIT)
def test_in_bf16_chunks_and_halves_change_no_bit(schedule: str, chunks: int) -> None:
    expected_losses, expected = bf16_outcome("1f1b", 1)
    losses, found = bf16_outcome(schedule, chunks)
    assert losses == expected_losses
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("interleaved-1f1b", 2)])
def test_activations_go_to_pinned_memory_and_come_back_in_streams_beside(schedule: str, chunks: int) -> None:
    task, found = ids_task(STEPS, SAMPLES, LENGTH), []
    for offload in (None, 1):
        plan = qs.compile(schedule, mesh="pp=1", microbatches=4, chunks=chunks, offload=offload)
        with sdpa_kernel(SDPBackend.MATH):
            found.append(train_rank(alone(), plan, task, tiny_gpt(LENGTH), dtype=torch.float32))
    stays, goes = found
    assert goes.losses == stays.losses
    for name, weight in goes.weights.items():
        assert torch.equal(weight, stays.weights[name]), name


def test_a_dropout_draws_what_it_draws_on_the_host() -> None:
    layer, masks = torch.nn.Dropout(0.3), Masks(0)
    key_dropouts(layer, 0, masks)
    found = []
    for device in (DEVICE, "cpu"):
        with masks.of(Unit(7, range(8, 16), torch.arange(4, 8, device=device))):
            found.append(layer(torch.ones(8, 4, 300, device=device)).cpu())
    assert torch.equal(*found)
