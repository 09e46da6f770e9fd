"""What each rank said last: where in its program it was, for how long, what it waited for, and what became of it.

    rank 0   step 17   index 12  Bwd(stage=0, microbatch=1)   waits for its receive 11   for 5.1 s   heard 0.1 s ago
    rank 1   step 17   index  9  Fwd(stage=1, microbatch=3)   waits for nothing          for 5.2 s   heard 5.1 s ago

The states of a run are taken at slightly different times: each says how old it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from quintsched.errors import printable

Phase: TypeAlias = Literal["setup", "data", "step", "evaluate", "save", "load", "idle", "ended"]
"""What a rank is about; instructions have an index in `step` and `evaluate` only."""

FateKind: TypeAlias = Literal["exit", "signal", "stopped", "error", "gone", "unreachable", "silent"]
"""What became of a process.

`exit`: it ended, its code is known. `signal`: a signal ended it. `stopped`: it lives but does not run, as after a
SIGSTOP. `error`: it raised, `text` says what. `gone`: it ended, nobody knows how. `unreachable`: its connection is cut,
and it may live. `silent`: it does not answer though its machine does, which is not that of who asks: it is stopped, or
its interpreter is held.
"""


MOST_TEXT = 2**16
"""The letters of a text."""


@dataclass(frozen=True)
class Fate:
    """What became of a process; `code` is an exit code or the number of a signal.

    `text` is made `printable`. `ago_s` is how long ago it was noticed, in seconds: processes that end after the first
    may end because of it.
    """

    kind: FateKind
    code: int | None = None
    text: str = ""
    ago_s: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", printable(self.text, MOST_TEXT))


@dataclass(frozen=True)
class Wait:
    """What a rank is waiting for, in a call that returns when another rank has done its part.

    `receive`: what the receive at `index` of its program brings. `send`: that its send at `index` is received; between
    programs, that is one of the program that it ran last. `collective`: the others of the group `ranks`, itself
    included. `nothing`: it says that it waits for nobody.
    """

    kind: Literal["receive", "send", "collective", "nothing"]
    index: int | None = None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Given:
    """What a rank was given of its latest batch, which is the `number`-th of its run; 0: it was not, or need not be.

    `samples` of inputs, their `length` (dimension 1), and rows of `targets`.
    """

    number: int = 0
    samples: int = 0
    length: int = 0
    targets: int = 0


@dataclass(frozen=True)
class RankState:
    """What a global rank said last.

    Attributes:
        rank: the global rank; `host` and `pid` say where it runs.
        phase: what it is about.
        step: the number of the training step that it has begun last, the first of the run is 1; None before that.
        program: which of the run's plans it walks, or walked last, "train" or "forward": their modes.
        index: the instruction at whose place in its program it is. A receive that is posted ahead of its place, and a
            send that is issued ahead, are at the place where that is done. None between programs.
        since_s: how long it has been there, in seconds up to now.
        heard_s: how long ago it said so, in seconds.
        fate: what became of its process; None while that runs.
        awaits: what it waits for at that place; None where it does not say, as on accelerators, whose host waits last.
        run: how many programs it has begun to walk: the same number on all ranks for the same program, also where a
            step has several of them. It has ended that one where `index` is None. None where it does not say; the
            step's number then has to tell them apart.
        sent: the bytes of the last message that it has sent which was longer than those before it by the instruction
            `sent_at`; 0 where there was none, or it does not say.
        room: the bytes of the longest message that it has room for; 0 where it does not say.
        given: what it was given of its latest batch.
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
    awaits: Wait | None = None
    run: int | None = None
    sent: int = 0
    sent_at: int | None = None
    room: int = 0
    given: Given = Given()

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", printable(self.host, MOST_TEXT))
