"""When receives are posted and into which buffers: worked out once, from the plan's own data flow.

A transport that matches messages by tag lets receives be posted ahead of their place, where they block nobody: then a
message lands while the rank still computes. Two receives per channel are under way at a time.

    program      Fwd 0   RecvGrad 0   Bwd 0   RecvGrad 1   Bwd 1   RecvGrad 2  Bwd 2
    posted at    ^ 0, 1                      ^ 2 (its buffer is that of 0)

A buffer serves again when what it held is done with: an activation after its backward, a gradient after its use, both
after the weight half where a backward runs in halves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from quintsched.dataflow import Flow, Kind, Value
from quintsched.instructions import Instruction, Recv

AHEAD = 2

KEEPS = (Kind.SAVED, Kind.PENDING)
"""What holds on to the memory of what an instruction took."""


@dataclass(frozen=True)
class Posting:
    """A receive of `value` from pp rank `peer`, issued before instruction `at`, into buffer `slot` of its kind."""

    value: Value
    peer: int
    at: int
    slot: int


def plan_receives(program: Sequence[Instruction], flows: Sequence[Flow], *, ahead: bool) -> list[Posting]:
    """Return the receives of a program in the order in which they are issued.

    `ahead` posts them early, as above; else each stands at its own place. Slots are numbered per (kind, stage) of
    the value from 0, as few as suffice.
    """
    taken = {value: index for index, flow in enumerate(flows) for value in flow.consumes}
    channels: dict[int, list[int]] = defaultdict(list)
    posted: list[tuple[int, int, Value, int]] = []
    for index, instruction in enumerate(program):
        if isinstance(instruction, Recv):
            value = flows[index].produces[0]
            before = channels[instruction.peer]
            early = before[-AHEAD] + 1 if len(before) >= AHEAD else 0
            posted.append((min(early, index) if ahead else index, index, value, instruction.peer))
            before.append(taken[value])
    return _assign_slots(sorted(posted, key=lambda p: p[:2]), _releases(flows, taken))


def _releases(flows: Sequence[Flow], taken: dict[Value, int]) -> dict[Value, int]:
    """Return after which instruction the memory of each value is free: when nothing that keeps it stands any more."""

    def release(index: int) -> int:
        kept = [value for value in flows[index].produces if value.kind in KEEPS]
        return release(taken[kept[0]]) if kept else index

    return {value: release(index) for value, index in taken.items()}


def _assign_slots(posted: Sequence[tuple[int, int, Value, int]], release: dict[Value, int]) -> list[Posting]:
    busy_until: dict[tuple[Kind, int], list[int]] = defaultdict(list)
    postings = []
    for at, _, value, peer in posted:
        slots = busy_until[value.kind, value.stage]
        slot = next((number for number, last in enumerate(slots) if last < at), len(slots))
        slots[slot : slot + 1] = [release[value]]
        postings.append(Posting(value, peer, at, slot))
    return postings
