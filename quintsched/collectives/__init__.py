"""Collectives spelled out in messages: mini-plans over one axis, proved, timed, drawn and run like everything else.

    spell("all_reduce", "ring", 4)  ──▶  CollectivePlan  ──▶ check()       every rank ends with every sum, each once
                                               │         ──▶ simulate()    latency, bandwidth, bandwidth use
                                               └── runtime.spelled runs it on any transport

`program` has the words, `ring` and `double_tree` write the programs, `proof` and `timing` judge them, `choice` picks
one for a message, `calls` says which ones a plan needs, `files` reads and writes them.
"""

from __future__ import annotations

from quintsched.collectives.choice import NATIVE, Communication
from quintsched.collectives.program import CollectivePlan
from quintsched.collectives.spelling import spell
from quintsched.collectives.timing import CollectiveRun
from quintsched.ir.communication import Wire

__all__ = ["NATIVE", "CollectivePlan", "CollectiveRun", "Communication", "Wire", "spell"]
