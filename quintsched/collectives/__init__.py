"""Collectives spelled out in messages: mini-plans over one axis, proved, timed, drawn and run like everything else.

    spell("all_reduce", "ring", 4)  ──▶  CollectivePlan  ──▶ check()       every rank ends with every sum, each once
                                               │         ──▶ simulate()    latency, bandwidth, bandwidth use
                                               └── runtime.comm.message_collectives runs it on any transport

`program` has the words, `ring` and `double_tree` write the programs, `proof` and `timing` judge them, `choice` picks
one for a message, `collective_json` reads and writes them. Imports `graph`, `ir` and `files`; never sees a plan.
"""

from __future__ import annotations

from quintsched.collectives.collective_plan import CollectivePlan, spell
from quintsched.collectives.timing import CollectiveRun
from quintsched.ir.communication import NATIVE, Communication, Wire

__all__ = ["NATIVE", "CollectivePlan", "CollectiveRun", "Communication", "Wire", "spell"]
