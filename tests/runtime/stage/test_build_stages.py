"""Stages are built of blocks: the cut with the smallest maximum, modules that one rank trains, weights that tie."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import quintsched as qs
from quintsched.runtime import Engine, run_local
from quintsched.runtime.stage.build_stages import partition

from ..toys import ids_task, sgd, tiny_gpt, train_on, train_plainly
from ..trials import engine_of, ones

COSTS = st.lists(st.integers(0, 20).map(float) | st.floats(0, 10), min_size=1, max_size=9)


def every_cut(num_blocks: int, stages: int) -> Iterator[list[range]]:
    for cuts in combinations(range(1, num_blocks), stages - 1):
        yield [range(a, b) for a, b in zip((0, *cuts), (*cuts, num_blocks), strict=True)]


def slowest(costs: list[float], cut: list[range]) -> float:
    return max(sum(costs[block] for block in stage) for stage in cut)


@given(costs=COSTS, data=st.data())
def test_a_cut_has_the_smallest_maximum_of_all(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    cut = partition(costs, stages)
    assert [block for stage in cut for block in stage] == list(range(len(costs)))
    assert len(cut) == stages
    assert all(cut)
    assert slowest(costs, cut) == min(slowest(costs, other) for other in every_cut(len(costs), stages))


def test_first_stages_take_as_much_as_they_can() -> None:
    assert partition([1.0] * 5, 3) == [range(2), range(2, 4), range(4, 5)]
    with pytest.raises(qs.MisfitError, match="2 blocks cannot fill 3 stages"):
        partition([1.0, 1.0], 3)


def test_one_rank_of_a_process_trains_a_module_and_later_ranks_may_train_it_again() -> None:
    blocks = [nn.Linear(4, 4), nn.Linear(4, 4)]

    def train(mesh: str) -> float:
        return run_local(2, lambda one: engine_of(one, blocks, mesh=mesh).step(*ones(4, 4)[0]).loss.item())[0]

    with pytest.raises(
        qs.MisfitError, match=r"block 0 \(Linear\) is trained by another rank of this process; make the"
    ):
        train("dp=2")
    losses = [train("pp=2") for _ in range(3)]
    assert losses == sorted(losses, reverse=True)


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
        train_on(plan, ids_task(1, 4, length=6), tiny_gpt(6), dtype=torch.float64)


TIED: Mapping[str, Sequence[str]] = {"embedding": ("0.tokens.weight", "5.head.weight")}


def test_plan_and_model_must_tie_the_same() -> None:
    blocks = tiny_gpt(6, tied=True)
    untied = qs.compile("1f1b", mesh="pp=2", microbatches=2)
    with pytest.raises(qs.MisfitError, match=r"compile the plan with --tied embedding=0,1"):
        train_on(untied, ids_task(1, 4, length=6), blocks, dtype=torch.float64, tied=TIED)
    tied = qs.compile("1f1b", mesh="pp=2", microbatches=2, tied={"embedding": (0, 1)})
    for names, words in [
        ({}, "on stages none; name weights of 'embedding', Engine"),
        ({"embedding": ("3.norm1.weight", "4.norm1.weight")}, r"on stages {'embedding': \(1,\)}; compile .* no --tied"),
    ]:
        with pytest.raises(qs.MisfitError, match=words):
            train_on(tied, ids_task(1, 4, length=6), blocks, dtype=torch.float64, tied=names)


def test_weights_that_are_not_there_or_differ_in_shape_are_refused() -> None:
    plan = qs.compile("1f1b", mesh="pp=1", microbatches=1)
    blocks = [lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 2)]
    for names, words in [
        (["0.weight"], "tied weight 'w' names 1 weights; name at least two"),
        (("0.weight", "7.weight"), "names begin with the number of a block"),
        (("0.weight", "1.scale"), "no weight of that name"),
        (("0.weight", "1.weight"), r"\(4, 4\) and \(2, 4\)"),
    ]:
        with pytest.raises(qs.MisfitError, match=words):
            Engine(plan, blocks, nn.functional.mse_loss, sgd, tied={"w": names})


def test_a_weight_inside_and_outside_of_what_is_shared_out_over_tp_is_refused() -> None:
    plan, task = qs.compile("1f1b", mesh="tp=2", microbatches=2), ids_task(1, 4, length=6)
    tied = {"norm": ("1.norm1.weight", "5.norm.weight")}
    alone = train_plainly(task, tiny_gpt(6), 2, dtype=torch.float64, tied=tied)
    found = train_on(plan, task, tiny_gpt(6), dtype=torch.float64, tied=tied)
    assert found[0].losses == pytest.approx(alone.losses, rel=1e-12)
    with pytest.raises(qs.MisfitError, match="on stage 0, and sequence parallelism gives but one of them all tokens"):
        train_on(plan, task, tiny_gpt(6), dtype=torch.float64, tied=tied, sequence_parallel=True)
