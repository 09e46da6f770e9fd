"""Handling of failed waits, in the runtime's collectives and in those of user code."""

from types import SimpleNamespace

import pytest
import torch

from quintsched.errors import CodeError, StallError
from quintsched.runtime.comm import torch_groups
from quintsched.runtime.comm.torch_groups import TorchGroup, as_stall
from quintsched.runtime.watch.position_publisher import Publisher
from quintsched.runtime.watch.rank_position import NOTHING
from quintsched.runtime.watch.watch_thread import Answer
from quintsched.stalls.verdict_text import NO_CULPRIT

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


def test_who_waits_in_the_comparison_before_a_collective_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def gather(output: torch.Tensor, tensor: torch.Tensor, **_: object) -> SimpleNamespace:
        output.copy_(tensor.repeat(2))
        return SimpleNamespace(wait=lambda: seen.append(group.wait_cell.memory[group.wait_cell.at]))

    def reduce(tensor: torch.Tensor, op: object, **_: object) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(torch_groups.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(torch_groups, "_GATHER", gather)
    monkeypatch.setattr(torch_groups.dist, "all_reduce", reduce)
    group = TorchGroup(None, (0, 1), torch.device("cpu"), Publisher())  # type: ignore[arg-type]
    group.wait_code = 20
    group.compare_collectives(True)
    work = group.all_reduce(torch.ones(3000))
    assert seen == [20]
    assert group.wait_cell.memory[group.wait_cell.at] == NOTHING
    work.wait()
