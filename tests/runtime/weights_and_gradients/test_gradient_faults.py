"""Faults that a review found in gradients: sums that began too early or too late, weights held twice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.runtime import Engine, ForwardEngine
from quintsched.runtime.blocks.block_builders import Blocks
from quintsched.runtime.comm import Transport, run_local

from ..linear_blocks import alone, batch, linear, squared_sum, train
from ..toys import sgd, worst_difference


@pytest.mark.parametrize("recompute", [0, 2])
def test_a_weight_that_blocks_of_a_stage_share_is_reduced_when_it_is_complete(recompute: int) -> None:
    shared = nn.ModuleList([linear() for _ in range(4)])
    shared[3].weight = shared[2].weight

    def blocks() -> Blocks:
        return list(copy.deepcopy(shared))

    plan = qs.compile("gpipe", mesh="dp=2", microbatches=2, recompute=recompute)
    assert worst_difference(train(plan, blocks, batch(8)), train(alone(), blocks, batch(8))[0]) < 1e-12


def test_the_engine_made_last_of_the_same_modules_trains_them() -> None:
    plan = qs.compile("zb-h1", mesh="pp=2", microbatches=2)
    data = batch(4)

    def run(transport: Transport) -> None:
        torch.manual_seed(0)
        modules = [linear().double(), nn.Dropout(0.5), linear().double(), nn.Dropout(0.5), linear().double()]
        first = Engine(plan, modules, squared_sum, sgd, transport=transport)
        first.step(*data)
        fresh = Engine(plan, copy.deepcopy(modules), squared_sum, sgd, transport=transport)
        second = Engine(plan, modules, squared_sum, sgd, transport=transport)
        for _ in range(2):
            assert torch.equal(second.step(*data).loss, fresh.step(*data).loss)
        with pytest.raises(qs.UsageError, match="another engine has been made of this one's blocks"):
            first.step(*data)
        own = sgd(second.stages[transport.rank].parameters())
        for optimizer in (own, second.optimizer):
            with pytest.raises(qs.UsageError, match=r"SGD.step\(\) is called on weights that an engine trains"):
                optimizer.step()
        ForwardEngine(qs.compile("inference", mesh="pp=2", microbatches=2), modules, transport=transport)
        own.step()  # an engine that runs forwards alone leaves training to others
        own_of_fresh = sgd(fresh.stages[transport.rank].parameters())
        fresh.close()
        own_of_fresh.step()
        fresh.optimizer.step()

    run_local(2, run)


def test_weights_that_zero_3_has_moved_are_refused_to_a_second_engine() -> None:
    plan = qs.compile("1f1b", mesh="dp=2", microbatches=1, zero=3)

    def run(transport: Transport) -> None:
        modules = [linear().double()]
        first = Engine(plan, modules, squared_sum, sgd, transport=transport)
        with pytest.raises(qs.MisfitError, match=r"block 0 \(Linear\) has no weights of its own: another engine"):
            Engine(plan, modules, squared_sum, sgd, transport=transport)
        first.step(*batch(2))

    run_local(2, run)
