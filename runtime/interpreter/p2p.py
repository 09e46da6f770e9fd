"""Messages: when receives are posted and into which buffers, when sends are issued, and when they are let go of.

A transport that matches messages by tag lets receives be posted ahead of their place, and sends be issued as soon as
there is something to send; neither blocks anybody. Of each stage's activations, and gradients, two receives are under
way at a time, or as many as take little memory: a wire that is told early of many small messages wakes the host less
often. On any other transport all stand at their own places, in the order that was proved.

    program      Fwd 0   RecvGrad 0   Bwd 0   RecvGrad 1   Bwd 1   RecvGrad 2  Bwd 2
    posted at    ^ 0, 1                      ^ 2 (its buffer is that of 0)

A buffer serves again when what it held is done with: an activation after its backward, a gradient after its use. What
was sent is let go of when the gradient that belongs to it comes back, or a few sends later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from quintsched.ir.dataflow import Flow, Kind, Value
from quintsched.ir.instructions import Instruction, Recv, Send

from .rank_state import Machine

AHEAD = 2
"""How many receives of a stage's activations, or of its gradients, are under way at least."""

AHEAD_BYTES = 2**18
"""More are under way where their buffers stay below this together."""

MOST_TAGS = 2**31

KEEPS = (Kind.SAVED, Kind.CHECKPOINT, Kind.PENDING)
"""What holds on to the memory of what an instruction took."""

Call = Callable[[], None]


@dataclass(frozen=True)
class Posting:
    """A receive of `value` from pp rank `peer`, issued before instruction `at`, into buffer `slot` of its kind.

    `index` is its own place.
    """

    value: Value
    peer: int
    at: int
    slot: int
    index: int


def plan_receives(
    program: Sequence[Instruction], flows: Sequence[Flow], ahead: Callable[[int], int] | None
) -> list[Posting]:
    """Return the receives of a program in the order in which they are issued.

    `ahead` says of each stage how many receives are under way of what it leaves, or of its gradient; where it is None,
    each stands at its own place. Slots are numbered per (kind, stage) of the value from 0, as few as suffice.
    """
    taken = {value: index for index, flow in enumerate(flows) for value in flow.consumes}
    tagged: dict[tuple[int, Kind, int], list[int]] = defaultdict(list)
    posted: list[tuple[int, int, Value, int]] = []
    for index, instruction in enumerate(program):
        if isinstance(instruction, Recv):
            value = flows[index].produces[0]
            before = tagged[instruction.peer, value.kind, value.stage]
            most = ahead(value.stage) if ahead else 0
            early = index if not most else before[-most] + 1 if len(before) >= most else 0
            posted.append((min(early, index), index, value, instruction.peer))
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
    for at, index, value, peer in posted:
        slots = busy_until[value.kind, value.stage]
        slot = next((number for number, last in enumerate(slots) if last < at), len(slots))
        slots[slot : slot + 1] = [release[value]]
        postings.append(Posting(value, peer, at, slot, index))
    return postings


def bind_receives(
    machine: Machine, program: Sequence[Instruction], flows: Sequence[Flow]
) -> list[tuple[Posting, Call]]:
    """Return the calls that post the receives, in the order in which they are issued, each slot's buffers made once."""

    def ahead(stage: int) -> int:
        return max(AHEAD, AHEAD_BYTES // max(sum(spec.nbytes for spec in machine.parcels[stage].specs), 1))

    postings = plan_receives(program, flows, ahead if machine.transport.profile == "tagged" else None)
    slots: dict[tuple[Kind, int, int], tuple[Tensor, ...]] = {}
    device = machine.transport.device
    for posting in postings:
        key = (posting.value.kind, posting.value.stage, posting.slot)
        if key not in slots:
            slots[key] = tuple(spec.empty(device) for spec in machine.parcels[posting.value.stage].specs)
    return [(p, _bind_receive(machine, p, slots[p.value.kind, p.value.stage, p.slot])) for p in postings]


def _bind_receive(machine: Machine, posting: Posting, buffers: tuple[Tensor, ...]) -> Call:
    cell, tags = machine.cell(posting.value), _tags(machine, posting.value)
    posts = [machine.transport.receiver(b, posting.peer, tag) for b, tag in zip(buffers, tags, strict=True)]

    cell.receive = posting.index
    if len(posts) > 1:

        def run() -> None:
            cell.held = buffers
            cell.works = [post() for post in posts]

        return run
    (post,) = posts

    def run_one() -> None:
        cell.held = buffers
        cell.works = (post(),)

    return run_one


def bind_sends(machine: Machine, program: Sequence[Instruction], flows: Sequence[Flow]) -> list[tuple[int, int, Call]]:
    """Return (place, own index, call) for every send: what issues it, and what lets go of an older one.

    A send is issued right after what makes its value where the transport matches by tag, else at its own place.
    Older ones are let go of at the send's own place, where that wait is known to be free of deadlock.
    """
    early = machine.transport.profile == "tagged"
    made = {value: index for index, flow in enumerate(flows) for value in flow.produces}
    channels: dict[int, list[Value]] = defaultdict(list)
    calls = []
    for index, instruction in enumerate(program):
        if isinstance(instruction, Send):
            value = flows[index].consumes[0]
            older = channels[instruction.peer]
            if machine.sends_kept is not None and len(older) >= machine.sends_kept:
                calls.append((index, index, _bind_let_go(machine, older[-machine.sends_kept], index)))
            calls.append((made[value] + 1 if early else index, index, _bind_send(machine, value, instruction.peer)))
            older.append(value)
    return calls


def _bind_let_go(machine: Machine, value: Value, index: int) -> Call:
    cell = machine.cell(value)

    def run() -> None:
        if cell.sent is not None:
            machine.let_go(cell, index)

    return run


def _bind_send(machine: Machine, value: Value, peer: int) -> Call:
    cell = machine.cell(value)
    sends = [machine.transport.sender(peer, tag) for tag in _tags(machine, value)]
    machine.sending.append(cell)
    if len(sends) > 1:

        def run() -> None:
            tensors = tuple([tensor.contiguous() for tensor in cell.held])
            cell.held = ()
            cell.sent = [send(tensor) for send, tensor in zip(sends, tensors, strict=True)], tensors

        return run
    (send,) = sends

    def run_one() -> None:
        tensor = cell.held[0].contiguous()
        cell.held = ()
        cell.sent = (send(tensor),), (tensor,)

    return run_one


def _tags(machine: Machine, value: Value) -> list[int]:
    """Return the tags of the tensors that carry a value: no other value has them."""
    width = max(len(parcel.specs) for parcel in machine.parcels.values())
    number = (value.number * len(machine.plan.stage_to_pp) + value.stage) * 2 + (value.kind is Kind.OUTPUT_GRAD)
    return [(number * width + k) % MOST_TAGS for k in range(len(machine.parcels[value.stage].specs))]
