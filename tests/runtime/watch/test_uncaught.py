"""The error that ends ranks: one traceback of the user's code, a line on each other rank; torchrun is told."""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quintsched as qs
from quintsched.runtime import Engine, run_local
from quintsched.runtime.watch import uncaught_error
from quintsched.runtime.watch.rendezvous.network_addresses import LOOPBACK, listen
from quintsched.runtime.watch.rendezvous.rendezvous_store import serve

TRACE = "Traceback (most recent call last):"


class Picky(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take none but small numbers."""
        if not x.is_meta and x.abs().max() > 50:
            raise ValueError("no such token")
        return super().forward(x)


def error_of(run_step: Any) -> qs.QuintschedError:
    with pytest.raises(qs.QuintschedError) as caught:
        run_step()
    return caught.value


@pytest.fixture(scope="module")
def code_error() -> qs.QuintschedError:
    """Return the error of a step whose block raises."""

    def step(transport: Any) -> None:
        plan, blocks = qs.compile("1f1b", mesh="pp=1", microbatches=2), [partial(Picky, 4, 4)]
        engine = Engine(plan, blocks, nn.MSELoss(), partial(torch.optim.SGD, lr=0.1), transport=transport)
        engine.step(torch.ones(4, 4), torch.ones(4, 4))
        engine.step(100 * torch.ones(4, 4), torch.ones(4, 4))

    return error_of(lambda: run_local(1, step))


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve a launcher's store, as two ranks find it."""
    listener = listen(LOOPBACK)
    names = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(listener.getsockname()[1]), "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in {**names, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    store = serve(listener, 10)
    yield
    del store


def test_the_traceback_is_that_of_the_users_code(code_error, capsys):
    uncaught_error.report(code_error, 0, with_trace=True)
    head, note, *rest = capsys.readouterr().err.splitlines()
    trace = rest[rest.index(TRACE) :]
    assert head.endswith("stage 0, block 0 (Picky): ValueError: no such token")
    assert re.match(r"  on rank 0 \(pp=0\), instruction .*microbatch=0", note), note
    assert trace[-1] == "ValueError: no such token"
    assert trace.count(TRACE) == 1
    assert any(re.fullmatch(r"  … \d+ frames of quintsched and torch", line) for line in trace)
    assert 'raise ValueError("no such token")' in "\n".join(trace[-4:])
    assert not [line for line in trace if "bind_and_run_plans.py" in line or "module.py" in line]


def test_all_of_it_is_on_the_first_rank_alone(code_error, stores, capsys):
    uncaught_error.report(code_error, 1, with_trace=True)
    assert capsys.readouterr().err.count(TRACE) == 1
    uncaught_error.report(code_error, 0, with_trace=True)
    line = "error: rank 0: stage 0, block 0 (Picky): ValueError: no such token (rank 1 has printed all of it)\n"
    assert capsys.readouterr().err == line
    uncaught_error.report(KeyError("another"), 0, with_trace=True)
    assert capsys.readouterr().err.startswith("error: rank 0: KeyError: 'another'")


def test_a_verdict_is_printed_whole_once(stores: None, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = qs.StallError("rank 2 was killed\nrank 1 waits for it")
    verdict.was_told = False
    for rank in (1, 0):
        uncaught_error.report(verdict, rank, with_trace=False)
    assert capsys.readouterr().err.splitlines() == [
        "error: rank 2 was killed",
        "rank 1 waits for it",
        "error: rank 0: rank 2 was killed (rank 1 has printed all of it)",
    ]
    verdict.was_told = True
    uncaught_error.report(verdict, 0, with_trace=False)
    assert capsys.readouterr().err == ""


def test_torchrun_is_told_once(code_error: qs.QuintschedError, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    uncaught_error.report(code_error, 0, with_trace=True)
    uncaught_error.report(KeyError("later"), 0, with_trace=True)
    found = json.loads(file.read_text())["message"]
    assert found["message"] == found["extraInfo"]["py_callstack"]
    assert found["message"].endswith("block 0 (Picky): ValueError: no such token")
    assert int(found["extraInfo"]["timestamp"]) > 1_700_000_000
