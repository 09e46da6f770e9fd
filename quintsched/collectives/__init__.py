"""Collectives spelled out in messages: small plans over one axis, proved, timed, drawn and run like plans.

    spell("all_reduce", "ring", 4)  ──▶  CollectivePlan  ──▶ check()       every rank gets every sum, each term once
                                               │         ──▶ simulate()    latency, bandwidth, bandwidth use
                                               └── runtime.comm.message_collectives runs it on any transport

`collective_program` defines the steps, `ring_algorithm` and `double_tree_algorithm` generate the programs,
`collective_proof` and `collective_timing` analyse them, `gradient_exchange` picks one by message size,
`collective_json` is the file format. Imports `graph`, `ir` and `files`; knows no plans.
"""

from __future__ import annotations

from quintsched.collectives.collective_plan import CollectivePlan, spell
from quintsched.collectives.collective_timing import CollectiveRun
from quintsched.ir.collective_means_and_wire import NATIVE, Communication, Wire

__all__ = ["NATIVE", "CollectivePlan", "CollectiveRun", "Communication", "Wire", "spell"]
