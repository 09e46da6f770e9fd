"""Collectives that ranks do not issue alike are refused on all of them, where they are compared."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import Engine
from quintsched.runtime.comm import connect
from quintsched.runtime.comm.checked.gloo_small_reduces import DirectedGroups, SmallReduces
from quintsched.runtime.comm.torch_process_groups import SameCollectives
from quintsched.runtime.comm.transport_interface import ReduceOp

from ..ranks import run_ranks
from ..toys import sgd


def on_threads(size: int, run: Callable[[SameCollectives], None]) -> list[str]:
    """Run on members that gather through memory; return what each says."""
    rows: list[Tensor] = [torch.empty(0)] * size
    barrier = threading.Barrier(size, timeout=20)
    said = [""] * size

    def member(index: int) -> None:
        def gather(output: Tensor, mine: Tensor) -> None:
            rows[index] = mine
            barrier.wait()
            output.copy_(torch.cat(rows))
            barrier.wait()

        try:
            run(SameCollectives([4 + k for k in range(size)], index, torch.device("cpu"), gather))
        except MisfitError as error:
            said[index] = str(error)

    threads = [threading.Thread(target=member, args=(k,), daemon=True) for k in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return said


USUAL = "all_reduce sum float32 (4,)"


def test_another_kind_size_type_or_number_is_refused() -> None:
    for odd in ("all_gather float32 (4,)", "all_reduce sum float32 (5,)", "all_reduce sum int32 (4,)"):

        def run(checks: SameCollectives, odd: str = odd) -> None:
            checks.require(USUAL)
            checks.require(odd if checks._index == 1 else USUAL)

        (words,) = set(on_threads(3, run))
        assert words == (
            f"ranks [4, 5, 6] do not begin the same collective, by number: rank 4 2: {USUAL}; "
            f"rank 5 2: {odd}; rank 6 2: {USUAL}"
        )

    def skip(checks: SameCollectives) -> None:
        checks._number += checks._index
        checks.require(USUAL)

    assert f"rank 4 1: {USUAL}; rank 5 2: " in next(iter(set(on_threads(2, skip))))


def test_rows_that_nobody_expects_are_refused() -> None:
    def run(checks: SameCollectives) -> None:
        expects = [1, 2] if checks._index == 0 else [2, 3]
        checks.require("all_to_all float32 (0, 4)", sent=[1, 2], received=expects)

    (words,) = set(on_threads(2, run))
    assert words == "all_to_all 1 of ranks [4, 5]: rank 5 sends 1 row to rank 4, which expects 2"
    assert on_threads(2, lambda checks: checks.require("all_to_all float32 (0, 4)", [1, 1], [1, 1])) == ["", ""]


def reduce_otherwise(folder: Path) -> None:
    """Let the ranks of tp add up tensors of other shapes, in a group of an engine that checks everything."""
    transport = connect("gloo", timeout_s=60)
    plan = qs.compile("1f1b", mesh="tp=2", microbatches=1)
    engine = Engine(plan, [lambda: nn.Linear(4, 4)], nn.functional.mse_loss, sgd, transport=transport, verify=True)
    tensor = engine._groups.tensor
    tensor.all_reduce(torch.ones(4)).wait()
    try:
        tensor.all_reduce(torch.ones(4 + transport.rank)).wait()
    except MisfitError as error:
        (folder / f"{transport.rank}.txt").write_text(str(error))
    transport.close()


@pytest.mark.processes
def test_an_engine_that_verifies_compares_what_its_ranks_add_up(tmp_path: Path) -> None:
    assert run_ranks(reduce_otherwise, 2, tmp_path) == [0, 0]
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert first == second
    assert re.search(r"rank 0 \d+: all_reduce sum float32 \(4,\); rank 1 \d+: all_reduce sum float32 \(5,\)", first)


@pytest.mark.parametrize(("size", "elements"), [(3, 200), (2, 2000)])
def test_small_reductions_may_overlap_and_one_of_more_bytes_than_this_ranks_is_refused(size: int, elements: int):
    store, wait, ranks = dist.HashStore(), timedelta(seconds=20), tuple(range(size))

    def member(rank: int) -> None:
        stores = [dist.PrefixStore(way, store) for way in ("up", "down")]
        directed = DirectedGroups(*[dist.ProcessGroupGloo(each, rank, size, wait) for each in stores])
        reduces = SmallReduces(directed, ranks, 0)
        for _ in range(3):
            some = torch.tensor([rank, -rank]), torch.tensor(2.0**rank), torch.full((elements,), float(rank)).double()
            ops = ReduceOp.MIN, ReduceOp.SUM, ReduceOp.MAX
            assert all(map(reduces.takes, some))
            works = [reduces.begin(each, op) for each, op in zip(some, ops, strict=True)]
            for work in reversed(works):
                work.wait()
            found = [some[0].tolist(), some[1].item(), *set(some[2].tolist())]
            assert found == [[0, 1 - size], 2**size - 1, size - 1]
        work = reduces.begin(torch.ones(5 if rank == 1 else 4), ReduceOp.SUM)
        if rank == 1:
            work.wait()
        else:
            with pytest.raises(MisfitError, match="reduction of more than the 16 bytes of this rank"):
                work.wait()

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(member, ranks))
