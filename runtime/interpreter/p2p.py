"""Messages: when receives are posted and into which buffers, when sends are issued, and when they are released.

A transport that matches messages by tag lets receives be posted ahead of their place, and sends be issued as soon as
there is something to send; neither blocks anybody. Of each stage's activations, and gradients, two receives are in
flight at a time, or as many as take little memory: a wire that knows early of many small messages wakes the host less
often. On any other transport all keep their places in the program, in the order that was proved.

    program      Fwd 0   RecvGrad 0   Bwd 0   RecvGrad 1   Bwd 1   RecvGrad 2  Bwd 2
    posted at    ^ 0, 1                      ^ 2 (its buffer is that of 0)

A buffer is used again when nobody needs its content: an activation's after its backward, a gradient's after its use.
What was sent is released when the gradient that belongs to it comes back, or a few sends later.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from quintsched.ir.instructions import Recv, Send
from quintsched.ir.values import MAX_SKIPS, SKIPS, Kind, Value

from .data_flow import Flow, ProgramFlow
from .rank_state import MessageState

AHEAD = 2
"""How many receives of a stage's activations, or of its gradients, are in flight at least."""

AHEAD_BYTES = 2**18
"""More are in flight where their buffers stay below this together."""

MAX_SENDS = 4
"""How many sends of a channel may be in flight; the next one first waits for the oldest of them.

That wait is free of deadlock only for plans that are so under the `blocking` profile; for others nothing is awaited.
"""

MOST_TAGS = 2**31

KEEPS = (Kind.SAVED, Kind.CHECKPOINT, Kind.PENDING)
"""What holds on to the memory of what an instruction took; a skip that is taken again later does so to a skip's."""

Call = Callable[[], None]


@dataclass(frozen=True)
class Posting:
    """A receive of `value` from pp rank `peer`, issued before instruction `at`, into buffer `slot` of its line.

    `index` is its place in the program.
    """

    value: Value
    peer: int
    at: int
    slot: int
    index: int


Line = tuple[Kind, int, int]
"""Values that are alike but for their microbatch, and take turns in buffers: their kind, stage and skip."""


def line_of(value: Value) -> Line:
    """Return the line of a value."""
    return value.kind, value.stage, value.number % MAX_SKIPS if value.kind in SKIPS else 0


def plan_receives(flow_of: ProgramFlow, ahead: Callable[[Value], int] | None) -> list[Posting]:
    """Return the receives of a program in the order in which they are issued.

    `ahead` says of a value how many receives are in flight of its line; where it is None, each keeps its place in the
    program. Slots are numbered per line from 0, as few as suffice.
    """
    flows = flow_of.all()
    taken = {value: index for index, flow in enumerate(flows) for value in flow.consumes}
    tagged: dict[tuple[int, Line], list[int]] = defaultdict(list)
    posted: list[tuple[int, int, Value, int]] = []
    for index, instruction in enumerate(flow_of.program):
        if isinstance(instruction, Recv):
            value = flows[index].produces[0]
            before = tagged[instruction.peer, line_of(value)]
            most = ahead(value) if ahead else 0
            early = index if not most else before[-most] + 1 if len(before) >= most else 0
            posted.append((min(early, index), index, value, instruction.peer))
            before.append(taken[value])
    return _assign_slots(sorted(posted, key=lambda p: p[:2]), _releases(flows, taken))


def _releases(flows: Sequence[Flow], taken: dict[Value, int]) -> dict[Value, int]:
    """Return after which instruction the memory of each value is free: when nothing that keeps it is left."""

    def release(value: Value, index: int) -> int:
        again = (Kind.SKIP,) if value.kind is Kind.SKIP else ()
        kept = [made for made in flows[index].produces if made.kind in (*KEEPS, *again)]
        return max([release(made, taken[made]) for made in kept], default=index)

    return {value: release(value, index) for value, index in taken.items()}


def _assign_slots(posted: Sequence[tuple[int, int, Value, int]], release: dict[Value, int]) -> list[Posting]:
    busy_until: dict[Line, list[int]] = defaultdict(list)
    postings = []
    for at, index, value, peer in posted:
        slots = busy_until[line_of(value)]
        slot = next((number for number, last in enumerate(slots) if last < at), len(slots))
        slots[slot : slot + 1] = [release[value]]
        postings.append(Posting(value, peer, at, slot, index))
    return postings


def bind_receives(state: MessageState) -> list[tuple[Posting, Call]]:
    """Return the calls that post the receives, in the order in which they are issued, each slot's buffers made once."""

    def ahead(value: Value) -> int:
        return max(AHEAD, AHEAD_BYTES // max(sum(spec.nbytes for spec in state.cargo.specs(value)), 1))

    postings = plan_receives(state.flows, ahead if state.transport.profile == "tagged" else None)
    slots: dict[tuple[Line, int], tuple[Tensor, ...]] = {}
    device = state.transport.device
    for posting in postings:
        key = (line_of(posting.value), posting.slot)
        if key not in slots:
            slots[key] = tuple(spec.empty(device) for spec in state.cargo.specs(posting.value))
    return [(p, _bind_receive(state, p, slots[line_of(p.value), p.slot])) for p in postings]


def _bind_receive(state: MessageState, posting: Posting, buffers: tuple[Tensor, ...]) -> Call:
    cell, tags = state.cells.of(posting.value), _tags(state, posting.value)
    posts = [state.transport.receiver(b, posting.peer, tag) for b, tag in zip(buffers, tags, strict=True)]

    cell.receive = posting.index
    if len(posts) > 1:

        def run() -> None:
            cell.value = buffers
            cell.works = [post() for post in posts]

        return run
    (post,) = posts

    def run_one() -> None:
        cell.value = buffers
        cell.works = (post(),)

    return run_one


def bind_sends(state: MessageState) -> list[tuple[int, int, Call]]:
    """Return (place, index, call) for every send: what issues it, and what releases an older one.

    A send is issued right after what makes its value where the transport matches by tag, else at its place in the
    program. Older ones are released at that place, where the wait is known to be free of deadlock.
    """
    flows = state.flows.all()
    early = state.transport.profile == "tagged"
    made = {value: index for index, flow in enumerate(flows) for value in flow.produces}
    channels: dict[int, list[Value]] = defaultdict(list)
    calls = []
    for index, instruction in enumerate(state.flows.program):
        if isinstance(instruction, Send):
            value = flows[index].consumes[0]
            older = channels[instruction.peer]
            if state.max_sends is not None and len(older) >= state.max_sends:
                calls.append((index, index, _bind_release(state, older[-state.max_sends], index)))
            calls.append((made[value] + 1 if early else index, index, _bind_send(state, value, instruction.peer)))
            older.append(value)
    return calls


def _bind_release(state: MessageState, value: Value, index: int) -> Call:
    cell, cells = state.cells.of(value), state.cells

    def run() -> None:
        if cell.sent is not None:
            cells.release(cell, index)

    return run


def _bind_send(state: MessageState, value: Value, peer: int) -> Call:
    cell = state.cells.of(value)
    sends = [state.transport.sender(peer, tag) for tag in _tags(state, value)]
    state.cells.sending.append(cell)
    if len(sends) > 1:

        def run() -> None:
            tensors = tuple([tensor.contiguous() for tensor in cell.value])
            cell.value = ()
            cell.sent = [send(tensor) for send, tensor in zip(sends, tensors, strict=True)], tensors

        return run
    (send,) = sends

    def run_one() -> None:
        tensor = cell.value[0].contiguous()
        cell.value = ()
        cell.sent = (send(tensor),), (tensor,)

    return run_one


def _tags(state: MessageState, value: Value) -> list[int]:
    """Return the tags of the tensors that carry a value: no other value has them."""
    plan, lane, unit = state.flows.plan, int(value.kind in (Kind.OUTPUT_GRAD, Kind.SKIP_GRAD)), value.number
    if value.kind in SKIPS:
        unit, skip = divmod(value.number, MAX_SKIPS)
        lane += 2 * (1 + skip)
    number = (unit * len(plan.stage_to_pp) + value.stage) * 2 * (1 + len(plan.skips)) + lane
    return [(number * state.cargo.width + k) % MOST_TAGS for k in range(len(state.cargo.specs(value)))]
