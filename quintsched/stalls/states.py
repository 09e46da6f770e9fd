"""What each rank said last: where in its program it was, for how long, and what became of its process.

    rank 0   step 17   index 12  RecvGrad(stage=0, microbatch=1)   for 5.1 s   heard 0.1 s ago
    rank 1   step 17   index  9  Fwd(stage=1, microbatch=3)        for 5.2 s   heard 5.1 s ago   fate: stopped

The states of a run are taken at slightly different times: each says how old it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Phase: TypeAlias = Literal["setup", "data", "step", "evaluate", "save", "load", "idle", "ended"]
"""What a rank is about; instructions have an index in `step` and `evaluate` only."""

FateKind: TypeAlias = Literal["exit", "signal", "stopped", "error", "gone", "unreachable"]
"""What became of a process.

`exit`: it ended, its code is known. `signal`: a signal ended it. `stopped`: it lives but does not run, as after a
SIGSTOP. `error`: it raised, `text` says what. `gone`: it ended, nobody knows how. `unreachable`: its connection is cut,
and it may live.
"""


@dataclass(frozen=True)
class Fate:
    """What became of a process; `code` is an exit code or the number of a signal."""

    kind: FateKind
    code: int | None = None
    text: str = ""


@dataclass(frozen=True)
class RankState:
    """What a global rank said last; `fate` is None while its process runs.

    `step` counts from 1, and is None before the first. `program` says which of the run's plans it walks: "train" or
    "forward". `index` is the instruction of its program that it has begun and not ended, None between steps.
    `since_s` is how long it has been there, `heard_s` how long ago it said so, both in seconds.
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
