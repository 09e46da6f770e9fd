"""The hub and watchers of ranks: real sockets, real processes that are killed and stopped, a loop of one's own."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.watch import announce_verdict
from quintsched.runtime.watch.connect_to_monitor import tell_end
from quintsched.runtime.watch.hang_monitor import Hub
from quintsched.runtime.watch.monitor_sockets import (
    FRAME_HEAD,
    JSON,
    MOST_FRAME_BYTES,
    MOST_OF_STRANGERS,
    PLAN,
    FrameError,
    FrameReader,
    answer,
    challenge,
    is_answer,
    json_frame,
    message_of,
    plan_frame,
    plan_of,
)
from quintsched.runtime.watch.verdict_timing import Member
from quintsched.stalls.last_reported_rank_states import Fate
from quintsched.stalls.stall_report import StallReport

from ..ranks import run_ranks

RANK = """
import sys, time
import quintsched as qs
from quintsched.runtime.watch.position_in_shared_memory import INDEX
from quintsched.runtime.watch.connect_to_monitor import WatchOptions, find_watch

rank = int(sys.argv[1])
publisher = find_watch(rank, 2, WatchOptions(stall_after=1.0, report=sys.argv[2]), host_waits=True)
plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
publisher.number_of(plan)
publisher.enter("step", step=3)
publisher.walk(plan)
publisher.numbers[INDEX] = 4 + rank
sys.stdout.write("here\\n")  # in one piece: ranks share their launcher's output
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub(2, tell=lambda verdict: None)
    made.start()
    yield made
    made.close()


@contextmanager
def running(hub: Hub, code: str, *arguments: object) -> Iterator[Any]:
    """Run a program that the hub watches, which has said that it is there; it ends with the context."""
    command, pipe = [sys.executable, "-c", code, *map(str, arguments)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | hub.environment) as process:
        try:
            assert process.stdout.readline() == "here\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def start_rank(hub: Hub, tmp_path: Path) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    with ExitStack() as held:
        yield lambda rank: held.enter_context(running(hub, RANK, rank, tmp_path / "stall.json"))


@pytest.mark.processes
def test_a_stopped_rank_elsewhere_is_named_since_it_does_not_answer(hub, start_rank, monkeypatch):
    monkeypatch.setattr(hub, "_machine", "another")
    monkeypatch.setattr("quintsched.runtime.watch.verdict_timing.CUT_OFF_S", 2.5)
    monkeypatch.setattr("quintsched.runtime.watch.stall_limits.FIRST_S", 1.0)
    ranks = [start_rank(0), start_rank(1)]
    time.sleep(1.0)  # where they are is sampled
    ranks[1].send_signal(signal.SIGSTOP)
    found = hub.wait_verdict(8)
    assert found.culprits == (1,)
    assert "does not answer, as if it were stopped; it was last heard of in step 3 at instruction 5" in found.message
    ranks[1].send_signal(signal.SIGCONT)
    assert [process.wait(10) for process in ranks] == [4, 4]  # it hears that when it goes on


@pytest.mark.processes
def test_a_launcher_elsewhere_tells_how_a_rank_ended(hub, start_rank, monkeypatch):
    monkeypatch.setattr(hub, "_machine", "another")
    ranks = [start_rank(0), start_rank(1)]
    assert not tell_end(f"{hub.address} wrong", 0, 5)
    time.sleep(1.0)  # where they are is sampled
    ranks[1].kill()
    assert tell_end(f"{hub.address} {hub.key}", 1, -signal.SIGKILL)
    verdict = hub.wait_verdict(5)
    assert verdict.culprits == (1,)
    assert "was killed by SIGKILL in step 3" in verdict.message
    assert not tell_end("127.0.0.1:1 key", 0, 5)


def test_strangers_learn_nothing_and_cannot_speak(hub: Hub) -> None:
    host, port = hub.address.split(":")
    for said in (
        b"GET / HTTP/1.0\r\n\r\n",
        FRAME_HEAD.pack(JSON, 10**9),
        _frame({"answer": "?", "rank": 0}),
        _frame({}),
    ):
        with socket.create_connection((host, int(port)), timeout=5) as stranger:
            asked = stranger.recv(4096)
            assert hub.key.encode() not in asked
            stranger.sendall(said)
            assert stranger.recv(4096) == b""
    assert hub.verdict is None


def _frame(message: dict[str, object]) -> bytes:
    payload = json.dumps(message).encode()
    return FRAME_HEAD.pack(JSON, len(payload)) + payload


@pytest.mark.parametrize("kind", ["link", "slow"])
def test_the_verdict_waits_for_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path, precious = tmp_path / "stall.json", tmp_path / "precious"
    precious.write_text("mine")
    if kind == "link":
        path.symlink_to(precious)
    else:
        writes = announce_verdict.write_plain
        monkeypatch.setattr(announce_verdict, "write_plain", lambda *given: (time.sleep(1.5), writes(*given)))
    plans = announce_verdict.Plans()
    plans.add_plan(0, qs.compile("1f1b", mesh="pp=2", microbatches=2).to_json().encode())
    members = [Member(0, has_come=True), Member(1, has_come=True, fate=Fate("signal", 9))]
    began = time.monotonic()
    made = announce_verdict.make_verdict(members, plans, path, 1.0, still_s=1.0)
    assert time.monotonic() - began < 1.2
    assert made.culprits == (1,)
    assert {"link": "it is a symbolic link", "slow": "still being written"}[kind] in made.message
    made.wait_report()
    assert precious.read_text() == "mine"
    assert kind != "slow" or StallReport.load(path).ranks == (1,)


class Killed(nn.Module):
    """Kills its process, once it is due."""

    is_due = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is given, if ever."""
        if Killed.is_due:
            Path("began").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def loop(folder: Path, culprit: int) -> None:
    """Make steps until the fault comes; what this rank says of it goes into a file, as does a SIGTERM of torchrun's."""
    os.chdir(folder)
    rank = int(os.environ["RANK"])
    sys.stderr = (folder / f"{rank}.txt").open("w")
    plan = qs.compile("1f1b", mesh="pp=3", microbatches=2)
    blocks = [lambda: nn.Sequential(nn.Linear(8, 8), Killed())] * 3
    engine = Engine(plan, blocks, nn.MSELoss(), lambda given: torch.optim.SGD(given, lr=0.1), stall_after=3)
    data = torch.randn(4, 8)
    for step in range(1, 100):
        Killed.is_due = step == 5 and rank == culprit
        if step == 5:  # which torchrun answers with this
            threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        try:
            engine.step(data, data)
        except qs.StallError as error:
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
            os._exit(error.exit_code)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_all_that_are_left_say_the_same_and_end_with_4(tmp_path: Path) -> None:
    culprit = 0
    codes = run_ranks(loop, 3, tmp_path, culprit)
    ended = time.time() - float((tmp_path / "began").read_text())
    assert codes == [-signal.SIGKILL, 4, 4]
    report = StallReport.load(tmp_path / "stall.json")
    assert report.ranks == (culprit,)
    assert (report.culprits[0].step, report.culprits[0].phase) == (5, "step")
    first_line = report.words().splitlines()[0]
    said = [(tmp_path / f"{rank}.txt").read_text() for rank in range(3) if rank != culprit]
    assert all(first_line in text for text in said), said
    assert ended < 60


def reader() -> FrameReader:
    made = FrameReader()
    made.is_known = True
    return made


@given(st.lists(st.integers(1, 50)), st.text())
def test_frames_come_whole_however_they_are_cut(cuts: list[int], text: str) -> None:
    sent = json_frame({"error": text}) + plan_frame(3, text) + json_frame({})
    kept, found = reader(), []
    for cut in [*cuts, len(sent)]:
        part, sent = sent[:cut], sent[cut:]
        found += kept.feed(part)
    assert [kind for kind, _ in found] == [JSON, PLAN, JSON]
    assert message_of(found[0][1]) == {"error": text}
    assert plan_of(found[1][1]) == (3, text.encode())


def test_a_length_is_refused_before_it_is_read_and_strangers_may_say_little() -> None:
    for made, kind, length in (
        (reader, JSON, MOST_FRAME_BYTES[JSON] + 1),
        (reader, PLAN, MOST_FRAME_BYTES[PLAN] + 1),
        (reader, b"X", 1),
        (FrameReader, JSON, MOST_OF_STRANGERS + 1),
        (FrameReader, PLAN, 1),
    ):
        with pytest.raises(FrameError):
            list(made().feed(FRAME_HEAD.pack(kind, length)))


def test_what_is_no_message_or_no_plan_is_refused() -> None:
    cut = struct.pack(">I", 1) + zlib.compress(b"x")[:-1]
    for payload in (b"", b"[]", b"null", b"{", b"\xff", b"[" * 50_000):
        with pytest.raises(FrameError):
            message_of(payload)
    for payload in (b"", b"\0\0\0", b"\0\0\0\1nothing", cut):
        with pytest.raises(FrameError):
            plan_of(payload)


def test_only_who_knows_the_key_can_answer() -> None:
    asked = challenge()
    assert is_answer(answer("key", asked, "rank"), "key", asked, "rank")
    wrong = [("other", asked, "rank"), ("key", asked, "hub"), ("key", challenge(), "rank")]
    for odd in (None, 5, "", "ü", asked, *(answer(*one) for one in wrong)):
        assert not is_answer(odd, "key", asked, "rank")
