"""Real processes over gloo: every collective and message; what cannot connect; what ranks do not issue alike."""

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine, Transport, connect
from quintsched.runtime.comm.gloo_and_nccl_transports import require_same_backend
from quintsched.runtime.comm.torch_process_groups import SameCollectives

from ...helpers.refusals import refusals
from ..ranks import run_ranks
from ..toys import sgd
from .group_checks import CHAIN, WORLD, check_collectives, make_groups


def run_rank() -> None:
    """Check groups, and messages: rank 0 sends three tags forward, each rank passes them on, received in reverse."""
    t = connect("gloo", timeout_s=60)
    for group, dtype in product(make_groups(t), (torch.float32, torch.bfloat16, torch.int64)):
        check_collectives(t, group, dtype)
    t.open_channels(CHAIN)
    buffers = {tag: torch.full((2, 2), float(tag), dtype=torch.bfloat16) for tag in (1, 2, 70_000)}
    if t.rank > 0:
        works = [t.recv(buffer.zero_(), t.rank - 1, tag) for tag, buffer in reversed(buffers.items())]
        for work in works:
            work.wait()
        assert all(buffer.eq(tag).all() for tag, buffer in buffers.items() if tag < 256)
    works = [t.send(buffer, t.rank + 1, tag) for tag, buffer in buffers.items()] if t.rank < WORLD - 1 else []
    for work in works:
        work.wait()
    t.close()


@pytest.mark.processes
def test_four_processes_over_gloo() -> None:
    assert run_ranks(run_rank, WORLD) == [0] * WORLD


def test_what_cannot_connect_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    refusals: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        (("gloo", "mailbox"), qs.UsageError, "gloo cannot follow the rules 'mailbox', only rendezvous, nccl"),
        (("nccl", "rendezvous"), qs.UsageError, "nccl cannot follow the rules 'rendezvous', only nccl"),
        (("gloo",), qs.UsageError, r"RANK.* not in the environment; start the ranks with torchrun"),
        (("ncl",), qs.UsageError, r"unknown transport 'ncl'; did you mean 'nccl'"),
        *([] if torch.cuda.is_available() else [(("nccl",), qs.MisfitError, "nccl wants a CUDA device")]),
    ]
    for (backend, *rules), kind, words in refusals:
        with pytest.raises(kind, match=words):
            connect(backend, **dict(zip(["rules"], rules, strict=False)))


def said_by(size: int, run: Callable[[SameCollectives], None]) -> list[str]:
    """Run on members, ranks 4 and on of a job; return what each says that refuses."""

    def member(transport: Transport) -> None:
        group = transport.world_group()

        def gather(output: Tensor, mine: Tensor) -> None:
            group.all_gather(output, mine).wait()

        run(SameCollectives([4 + k for k in range(size)], transport.rank, transport.device, gather))

    return refusals(size, member)


USUAL = "all_reduce sum float32 (4,)"


@pytest.mark.parametrize(
    "odd", ["all_gather float32 (4,)", "all_reduce sum float32 (5,)", "all_reduce sum int32 (4,)", ""]
)
def test_another_kind_size_type_or_number_is_refused(odd: str) -> None:
    def run(checks: SameCollectives) -> None:
        checks.require(USUAL)
        checks._number += checks._index == 1 and not odd
        checks.require(odd if odd and checks._index == 1 else USUAL)

    (words,) = set(said_by(3, run))
    assert words == (
        f"ranks [4, 5, 6] do not begin the same collective, by number: rank 4 2: {USUAL}; "
        f"rank 5 {2 if odd else 3}: {odd or USUAL}; rank 6 2: {USUAL}"
    )


def reduce_otherwise(folder: Path) -> None:
    """Let the ranks of tp add up tensors of other shapes, in a group of an engine that checks everything."""
    transport = connect("gloo", timeout_s=60)
    plan = qs.compile("1f1b", mesh="tp=2", microbatches=1)
    engine = Engine(plan, [lambda: nn.Linear(4, 4)], nn.functional.mse_loss, sgd, transport=transport, verify=True)
    tensor = engine._groups.tensor
    tensor.all_reduce(torch.ones(4)).wait()
    try:
        tensor.all_reduce(torch.ones(4 + transport.rank)).wait()
    except qs.MisfitError as error:
        (folder / f"{transport.rank}.txt").write_text(str(error))
    transport.close()


@pytest.mark.processes
def test_an_engine_that_verifies_compares_what_its_ranks_add_up(tmp_path: Path) -> None:
    assert run_ranks(reduce_otherwise, 2, tmp_path) == [0, 0]
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert first == second
    assert re.search(r"rank 0 \d+: all_reduce sum float32 \(4,\); rank 1 \d+: all_reduce sum float32 \(5,\)", first)


def test_rows_that_nobody_expects_are_refused() -> None:
    def run(checks: SameCollectives) -> None:
        expects = [1, 2] if checks._index == 0 else [2, 3]
        checks.require("all_to_all float32 (0, 4)", sent=[1, 2], received=expects)

    (words,) = set(said_by(2, run))
    assert words == "all_to_all 1 of ranks [4, 5]: rank 5 sends 1 row to rank 4, which expects 2"
    assert said_by(2, lambda checks: checks.require("all_to_all float32 (0, 4)", [1, 1], [1, 1])) == ["ran", "ran"]


def test_ranks_that_come_with_different_backends_are_refused_at_once() -> None:
    """As where one node has a GPU for each of its ranks and another has not."""
    for first, second in (("nccl", "gloo"), ("gloo", "nccl")):
        store = dist.HashStore()
        require_same_backend(first, store, rank=0)
        require_same_backend(first, store, rank=1)
        with pytest.raises(qs.MisfitError, match=f"rank 2 connects over {second}, but rank 0 over {first}; give every"):
            require_same_backend(second, store, rank=2)
