"""Last reported state of each rank: its place in the program, for how long, its wait, and the fate of its process.

    rank 0   step 17   index 12  Bwd(stage=0, microbatch=1)   waits for its receive 11   for 5.1 s   reported 0.1 s ago
    rank 1   step 17   index  9  Fwd(stage=1, microbatch=3)   waits for nothing          for 5.2 s   reported 5.1 s ago

The states are taken at slightly different times: each has its age.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from quintsched.errors import printable

Phase: TypeAlias = Literal["setup", "data", "step", "evaluate", "save", "load", "idle", "ended"]
"""Activity of a rank; instructions have an index in `step` and `evaluate` only."""

FateKind: TypeAlias = Literal["exit", "signal", "stopped", "error", "gone", "unreachable", "silent"]
"""Kind of a process's fate.

`exit`: it ended with a known exit code. `signal`: a signal killed it. `stopped`: it is alive but does not run, as after
a SIGSTOP. `error`: it raised, see `text`. `gone`: it ended in an unknown way. `unreachable`: its connection is cut, and
it may be alive. `silent`: it does not answer, although its machine (another than the observer's) does: it is stopped,
or its interpreter is blocked.
"""


MOST_TEXT = 2**16
"""Maximum number of characters of a text."""


@dataclass(frozen=True)
class Fate:
    """Fate of a process; `code` is an exit code or a signal number.

    `text` is made `printable`. `ago_s` is the time in seconds since it was noticed: processes that end after the first
    may end because of it.
    """

    kind: FateKind
    code: int | None = None
    text: str = ""
    ago_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", printable(self.text, MOST_TEXT))


@dataclass(frozen=True)
class BlockingCall:
    """Blocking call of a rank, which returns when another rank has done its part.

    `receive`: the message of the receive at `index` of its program. `send`: completion of its send at `index`; between
    programs, of the program that it ran last. `collective`: the other members of the group `ranks` (which includes
    itself). `nothing`: it waits for no rank.
    """

    kind: Literal["receive", "send", "collective", "nothing"]
    index: int | None = None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class GivenBatch:
    """Sizes of the latest batch given to a rank, the `number`-th of its run; 0: it was given none, or needs none.

    Number of `samples` of the inputs, their `length` (dimension 1), and rows of `targets`.
    """

    number: int = 0
    samples: int = 0
    length: int = 0
    targets: int = 0


@dataclass(frozen=True)
class RankState:
    """Last reported state of a global rank.

    Attributes:
        rank: the global rank; `host` and `pid` locate its process.
        phase: its activity.
        step: the training step begun last, counted from 1 within the run; None before the first.
        program: mode of the plan that it runs, or ran last: "train" or "forward".
        index: its current instruction. A receive that is posted ahead of its place, and a send that is issued ahead,
            count as the place where that is done. None between programs.
        since_s: seconds that it has been there, up to now.
        heard_s: seconds since it reported this.
        fate: fate of its process; None while it runs.
        awaits: its wait at that place; None if not reported, as on accelerators, whose host blocks late.
        run: number of programs that it has begun: equal on all ranks for the same program, even if a step has several.
            That program has ended if `index` is None. None if not reported; the step then has to tell them apart.
        sent: bytes of its last message that was longer than those before it, sent by the instruction `sent_at`; 0 if
            there was none, or it is not reported.
        room: bytes of the longest message that it has a buffer for; 0 if not reported.
        given: sizes of its latest batch.
    """

    rank: int
    host: str
    pid: int
    phase: Phase
    step: int | None
    program: str
    index: int | None
    since_s: float
    heard_s: float
    fate: Fate | None = None
    awaits: BlockingCall | None = None
    run: int | None = None
    sent: int = 0
    sent_at: int | None = None
    room: int = 0
    given: GivenBatch = GivenBatch()

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", printable(self.host, MOST_TEXT))
