"""Real processes over gloo, four of them and two by NCCL's rules; what connects, and what waits that fail become."""

import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from quintsched.errors import CodeError, MisfitError, StallError, UsageError
from quintsched.runtime.comm import SelfGroup, Transport, as_group, connect
from quintsched.runtime.comm.gloo_and_nccl_transports import require_same_backend
from quintsched.runtime.comm.torch_process_groups import as_stall
from quintsched.runtime.parallel.tensor.apply_tensor_parallel import apply_tensor_parallel
from quintsched.runtime.watch.position_publisher import Publisher
from quintsched.runtime.watch.watch_thread import Answer
from quintsched.stalls.verdict_text import NO_CULPRIT

from ..ranks import run_ranks
from .group_checks import CHAIN, WORLD, check_collectives, make_groups


def check_groups(t: Transport) -> None:
    trio, pair, world = make_groups(t)
    assert trio.ranks == ((0, 1, 2) if t.rank < 3 else (3,))
    assert isinstance(pair, SelfGroup) == (t.rank < 2)
    for group in (trio, pair, world):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            check_collectives(t, group, dtype)


def check_messages(t: Transport) -> None:
    """Rank 0 sends three tags forward, each rank passes them on; receives are posted in another order."""
    t.open_channels(CHAIN)
    buffers = {tag: torch.full((2, 2), float(tag), dtype=torch.bfloat16) for tag in (1, 2, 70_000)}
    if t.rank > 0:
        works = [t.recv(buffer.zero_(), t.rank - 1, tag) for tag, buffer in reversed(buffers.items())]
        for work in works:
            work.wait()
        assert all(buffer.eq(tag).all() for tag, buffer in buffers.items() if tag < 256)
    if t.rank < WORLD - 1:
        works = [t.send(buffer, t.rank + 1, tag) for tag, buffer in buffers.items()]
        for work in works:
            work.wait()


def check_process_groups() -> None:
    """A plain ProcessGroup will do for tensor parallelism."""
    torch.manual_seed(0)
    full = nn.ModuleDict({"fc1": nn.Linear(4, 8), "fc2": nn.Linear(8, 4)})
    x = torch.randn(3, 4)
    expected = full["fc2"](full["fc1"](x))
    assert dist.group.WORLD is not None
    assert as_group(dist.group.WORLD).ranks == tuple(range(WORLD))
    cut = apply_tensor_parallel(full, dist.group.WORLD)
    torch.testing.assert_close(cut["fc2"](cut["fc1"](x)), expected)


def fall_over(t: Transport) -> dict[str, object]:
    """Rank 3 is gone at a stroke, rank 2 sees it and fails for a reason of its own; all name rank 3 as the first."""
    if t.rank == 3:
        os._exit(9)
    began = time.monotonic()
    try:
        t.recv(torch.zeros(2), t.rank + 1, 5).wait()
    except StallError as error:
        told = {"error": str(error), "cause": type(error.__cause__).__name__, "after_s": time.monotonic() - began}
        t.abort(ValueError("bad batch") if t.rank == 2 else error)
        began = time.monotonic()
        t.close()
        return {**told, "close_s": time.monotonic() - began}
    return {}


def run_rank(folder: Path) -> None:
    transport, rank = connect("gloo", timeout_s=60), int(os.environ["RANK"])
    assert (transport.name, transport.profile, transport.rank, transport.world_size) == ("gloo", "tagged", rank, WORLD)
    check_groups(transport)
    check_messages(transport)
    check_process_groups()
    (folder / f"{rank}.json").write_text(json.dumps(fall_over(transport)))


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_four_processes_over_gloo_until_one_dies(tmp_path: Path) -> None:
    assert run_ranks(run_rank, WORLD, tmp_path) == [0, 0, 0, 9]
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert all(t["after_s"] < 20 and t["close_s"] < 5 and t["cause"] == "RuntimeError" for t in told)
    assert {t["error"] for t in told} & {  # as far as the system still knew what became of it
        f"rank 3 (host {socket.gethostname()}) {ended} setting up"
        for ended in ("ended with exit code 9", "ended, nobody saw how,")
    }
    assert len({t["error"] for t in told}) == 1


def stall(t: Transport) -> dict[str, object]:
    """Both ranks send before they receive: a deadlock where a send is a rendezvous."""
    began = time.monotonic()
    try:
        t.send(torch.zeros(2), 1 - t.rank, 7).wait()
    except StallError as error:
        told = {"error": str(error), "after_s": time.monotonic() - began}
        t.abort(error)
        began = time.monotonic()
        t.close()
        return {**told, "close_s": time.monotonic() - began, "threads": threading.active_count()}
    return {}


def run_fifo_rank(folder: Path) -> None:
    transport = connect("gloo", timeout_s=3, rules="nccl")
    assert (transport.name, transport.profile) == ("gloo", "channel")
    group = transport.make_group([(0, 1)])
    transport.open_channels([(0, 1), (1, 0)])
    check_collectives(transport, group, torch.float32)
    (folder / f"{transport.rank}.json").write_text(json.dumps(stall(transport)))


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_gloo_by_the_rules_of_nccl_until_it_stalls(tmp_path: Path) -> None:
    assert run_ranks(run_fifo_rank, 2, tmp_path) == [0, 0]
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert all(t["after_s"] < 10 and t["close_s"] < 5 and t["threads"] == 1 for t in told)
    assert max(t["after_s"] for t in told) >= 3
    for rank in range(2):
        assert f"rank {rank} sending to rank {1 - rank}: float32 (2,), tag 0: " in told[rank]["error"]


def test_what_cannot_connect_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    refusals: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        (("gloo", "mailbox"), UsageError, "gloo cannot follow the rules 'mailbox', only rendezvous, nccl"),
        (("nccl", "rendezvous"), UsageError, "nccl cannot follow the rules 'rendezvous', only nccl"),
        (("gloo",), UsageError, r"RANK.* not in the environment; start the ranks with torchrun"),
        (("ncl",), UsageError, r"unknown transport 'ncl'; did you mean 'nccl'"),
        *([] if torch.cuda.is_available() else [(("nccl",), MisfitError, "nccl wants a CUDA device")]),
    ]
    for (backend, *rules), kind, words in refusals:
        with pytest.raises(kind, match=words):
            connect(backend, **dict(zip(["rules"], rules, strict=False)))


def test_ranks_that_come_with_different_backends_are_refused_at_once() -> None:
    """As where one node has a GPU for each of its ranks and another has not."""
    for first, second in (("nccl", "gloo"), ("gloo", "nccl")):
        store = dist.HashStore()  # type: ignore[attr-defined]
        require_same_backend(first, store, rank=0)
        require_same_backend(first, store, rank=1)
        with pytest.raises(MisfitError, match=f"rank 2 connects over {second}, but rank 0 over {first}; give every"):
            require_same_backend(second, store, rank=2)


LOST = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer")
VERDICT = "rank 1 (host a) was killed by SIGKILL"


class Heard(Publisher):
    """A publisher whose hub says `message`, and that writes down what it is asked."""

    def __init__(self, message: str | None) -> None:
        super().__init__()
        self._message, self.asked = message, list[str]()

    def explain_failed_wait(self, said: str, *, in_code: bool = False) -> Answer | None:
        self.asked.append(said)
        return None if self._message is None else Answer(self._message, was_told=True)


def code_error(cause: Exception) -> CodeError:
    """Return what a loss function that raised becomes."""
    error = CodeError(f"the loss function raised {cause}")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("error", [LOST, code_error(LOST)], ids=["itself", "in a loss"])
def test_a_peer_that_is_lost_in_the_users_own_collective_is_the_verdicts(error: Exception) -> None:
    found = as_stall(error, Heard(VERDICT))
    assert isinstance(found, StallError)
    assert (str(found), found.was_told) == (VERDICT, True)


@pytest.mark.parametrize("message", [None, "", f"{NO_CULPRIT}; the ranks were last heard of here:"])
def test_without_a_verdict_that_names_a_rank_the_error_is_said_itself(message: str | None) -> None:
    assert as_stall(LOST, Heard(message)) is LOST


@pytest.mark.parametrize(
    "error", [ValueError("boom"), code_error(ValueError("boom")), StallError(VERDICT), code_error(StallError(VERDICT))]
)
def test_other_errors_are_left_and_nobody_is_asked(error: Exception) -> None:
    hub = Heard(VERDICT)
    assert as_stall(error, hub) is error
    assert hub.asked == []
