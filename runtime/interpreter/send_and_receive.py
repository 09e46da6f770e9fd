"""Binding of messages of activations, skips and gradients: when they are issued, and into which buffers.

    RecvAct, RecvSkip, … bind_receives   a call that posts the receive; the computation that takes the value waits
    SendAct, SendSkip, … bind_sends      a call that issues the send; for some, a later one that waits until it is done

On a transport that matches messages by tag, receives are posted ahead of their index in the program, and sends are
issued as soon as their tensor is ready; neither blocks. Two receives are in flight for each stage's activations, and
two for its gradients, or more where they take little memory: the host is woken less often where many small messages are
posted early. On any other transport, messages keep their index in the program, in the order that was proved.

    program      Fwd 0   RecvGrad 0   Bwd 0   RecvGrad 1   Bwd 1   RecvGrad 2  Bwd 2
    posted at    ^ 0, 1                      ^ 2 (its buffer is that of 0)

`quintsched.simulation.message_slots` computes how long a buffer, and a send in flight, is needed; the report of a plan
counts them by the same rule, with two receives ahead and messages of one size. Tensors of the same shape and dtype
share buffers, activations or gradients. Neither end issues the message of a unit that is skipped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache

from quintsched.ir.instruction_set import Message
from quintsched.ir.instruction_values import MAX_SKIPS, SKIPS, Value, ValueKind
from quintsched.simulation.message_slots import AHEAD, MessageRule, assign_slots, receive_lifetimes, send_lifetimes

from ..comm import Work
from ..comm.checked.gloo_small_reduces import EXCHANGE_TAGS
from ..comm.checked.message_frame import Label
from ..comm.overlap_threads import BoundCall
from ..stage.stage_forward import Outputs
from ..stage.tensors_sent_between_stages import Cargo
from ..step_setup.unit_samples import NO_UNITS, UnitShape
from ..watch.position_in_shared_memory import receive_code, send_code
from .instruction_state import BoundReceive, MessageState
from .program_dataflow import ProgramFlow, activation_of
from .values_between_instructions import AllWorks, ValueCell

AHEAD_BYTES = 2**18
"""More receives than `AHEAD` are in flight while the buffers of a stage stay below this number of bytes together."""


@dataclass(frozen=True)
class Posting:
    """A receive of `value` from rank `peer`, issued at `place` in the program, before that instruction.

    `index` is its own index in the program. Its tensors are received into the buffers `slots`, numbered from 0 among
    tensors of the same kind.
    """

    value: Value
    peer: int
    place: int
    slots: tuple[int, ...]
    index: int


def plan_receives(
    flows: ProgramFlow, rule: MessageRule, kinds_of: Callable[[Value], Sequence[Hashable]]
) -> list[Posting]:
    """Return the receives of a program in the order in which they are issued.

    `kinds_of` returns the kind of each tensor of a value: tensors of one kind share buffers, as few as suffice.
    """
    lifetimes = receive_lifetimes(flows.plan, rule).of_rank(flows.plan.columns, flows.pp_rank)
    indices, first, last = [column.tolist() for column in (lifetimes.rows, lifetimes.first, lifetimes.last)]
    values = [flows.operands[index].produces[0] for index in indices]
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for entry, value in enumerate(values):
        for kind in kinds_of(value):
            alike[kind].append(entry)
    slots = {
        kind: iter(assign_slots([first[entry] for entry in entries], [last[entry] for entry in entries]))
        for kind, entries in alike.items()
    }
    postings = []
    for index, value, place in zip(indices, values, first, strict=True):
        message = flows.program[index]
        assert isinstance(message, Message)
        own = tuple([next(slots[kind]) for kind in kinds_of(value)])
        postings.append(Posting(value, message.peer, place, own, index))
    return sorted(postings, key=lambda posting: (posting.place, posting.index))


def message_rule(state: MessageState) -> MessageRule:
    """Return when messages are posted on the rank's transport, and which sends are awaited."""

    def ahead(value: Value) -> int:
        return max(AHEAD, AHEAD_BYTES // max(sum([spec.nbytes for spec in state.shape.cargo.specs(value)]), 1))

    return MessageRule(ahead if state.transport.profile == "tagged" else None, state.max_sends)


def must_rebind(cargo: Cargo, bound: Cargo) -> bool:
    """Whether messages are so much larger than those of binding that too many bytes would be in flight.

    It can only be so for small messages, of which more than `AHEAD` are in flight.
    """
    largest = max(bound.nbytes, 1)
    return largest * AHEAD < AHEAD_BYTES and cargo.nbytes > 2 * largest


def unit_of(value: Value) -> int:
    """Return the unit of a value that is sent between ranks."""
    return value.number // MAX_SKIPS if value.kind in SKIPS else value.number


def bind_receives(state: MessageState) -> list[tuple[Posting, BoundCall]]:
    """Return the calls that post the receives, in the order in which they are issued."""
    specs_of = cache(state.shape.cargo.specs)
    postings = plan_receives(state.flows, message_rule(state), specs_of)
    specs = {spec for posting in postings for spec in specs_of(posting.value)}
    kinds = {spec: number for number, spec in enumerate(sorted(specs, key=lambda spec: (-spec.nbytes, str(spec))))}
    return [
        (posting, _bind_receive(state, posting, [kinds[spec] for spec in specs_of(posting.value)]))
        for posting in postings
    ]


def _bind_receive(state: MessageState, posting: Posting, kinds: Sequence[int]) -> BoundCall:
    """Return a call that posts a receive into its buffers, bound again when the shape of its unit changes."""
    value, current = posting.value, state.current
    cell, unit = state.cells.cell_of(value), unit_of(value)
    buffers, transport, labels = state.buffers, state.transport, _tags_and_labels(state, value, posting.index)
    cell.receive, cell.receive_code = posting.index, receive_code(posting.index)
    keys, index = list(zip(kinds, posting.slots, strict=True)), posting.index

    def bind(shape: UnitShape) -> BoundReceive:
        keyed = [*zip(keys, shape.cargo.specs(value), strict=True)]
        tensors = tuple([buffers.buffer_of(*key, spec) for key, spec in keyed])
        posts = [
            transport.receiver(tensor, posting.peer, *tag_and_label, buffers.room(*key, spec))
            for tensor, tag_and_label, (key, spec) in zip(tensors, labels, keyed, strict=True)
        ]
        post = posts[0] if len(posts) == 1 else lambda: AllWorks([post() for post in posts])
        return BoundReceive(index, cell, shape, buffers.generation, tensors, post)

    bound = bind(state.shape)

    def ready() -> BoundReceive | None:
        nonlocal bound
        shape = current.units.shapes[unit]
        if shape is not None and (bound.shape is not shape or bound.generation != buffers.generation):
            bound = bind(shape)
        return None if shape is None else bound

    return PostReceives(state, [(index, ready)])


class PostReceives:
    """Call that posts receives one after the other.

    `receives` are (index, a function that returns the receive of this step; None: its unit is skipped). They are
    bound again where the units differ, a buffer has grown, or another plan has run since.

    Attributes:
        index: index in the program of the receive whose post failed, for the error message.
    """

    __slots__ = ("_bound", "_generation", "_state", "_units", "index", "receives")

    def __init__(self, state: MessageState, receives: Sequence[tuple[int, Callable[[], BoundReceive | None]]]) -> None:
        self._state, self.receives, self.index = state, receives, receives[0][0]
        self._units, self._generation = NO_UNITS, -1
        self._bound: list[tuple[int, ValueCell, Outputs, Callable[[], Work]]] = []

    def __call__(self) -> None:
        """Post them."""
        units, generation = self._state.current.units, self._state.buffers.generation
        bound, receives = self._bound, self.receives
        if units is not self._units or generation != self._generation:
            bound.clear()
            for self.index, ready in receives:
                if (one := ready()) is not None:
                    bound.append((one.number, one.cell, one.tensors, one.post))
            self._units, self._generation = units, generation
        index = self.index
        try:
            for index, cell, tensors, post in bound:  # noqa: B007
                cell.value, cell.works = tensors, (post(),)
        except BaseException:
            self.index = index
            raise


def bind_sends(state: MessageState) -> list[tuple[int, int, BoundCall]]:
    """Return (place, index, call) for the calls that issue sends, and for those that release some of them.

    To release a send is to wait until it is done, and to drop its tensors. Each is released before the send that needs
    its slot; that of an activation at the latest when its gradient is taken, any other when the next step begins.
    """
    operands, plan = state.flows.operands, state.flows.plan
    lifetimes = send_lifetimes(plan, message_rule(state)).of_rank(plan.columns, state.flows.pp_rank)
    releases, sends = [], []
    columns = [column.tolist() for column in (lifetimes.rows, lifetimes.first, lifetimes.last)]
    for index, first, last in zip(*columns, strict=True):
        message, (value,) = state.flows.program[index], operands[index].consumes
        assert isinstance(message, Message)
        sends.append((first, index, _bind_send(state, value, message.peer, index)))
        gradients = [taken for taken in operands[last].consumes if taken.kind is ValueKind.OUTPUT_GRAD]
        if last + 1 < len(operands) and value not in map(activation_of, gradients):
            releases.append((last + 1, last + 1, _bind_release(state, value, last + 1)))
    return [*releases, *sends]


def _bind_release(state: MessageState, value: Value, index: int) -> BoundCall:
    cell, cells = state.cells.cell_of(value), state.cells

    def run() -> None:
        if cell.sent is not None:
            cells.release(cell, index)

    return run


def _bind_send(state: MessageState, value: Value, peer: int, index: int) -> BoundCall:
    cell, unit, current = state.cells.cell_of(value), unit_of(value), state.current
    sends = [state.transport.sender(peer, tag, label) for tag, label in _tags_and_labels(state, value, index)]
    state.cells.sending.append(cell)
    cell.send_code = send_code(index)
    (send, *others) = sends

    def issue() -> None:
        tensors = tuple([tensor.contiguous() for tensor in cell.value])
        cell.value = ()
        cell.sent = [send(tensor) for send, tensor in zip(sends, tensors, strict=True)], tensors

    def issue_one() -> None:
        tensor = cell.value[0].contiguous()
        cell.value = ()
        cell.sent = (send(tensor),), (tensor,)

    return current.unless_empty(unit, issue if others else issue_one)


_KINDS = {
    ValueKind.OUTPUT: "activation",
    ValueKind.OUTPUT_GRAD: "gradient",
    ValueKind.SKIP: "skip",
    ValueKind.SKIP_GRAD: "gradient of a skip",
}


def first_loan_tag(state: MessageState, message: Message) -> int:
    """Return the tag of a loan's pieces, behind the tags of all values; the next tag is that of their sizes."""
    plan, unit = state.flows.plan, message.microbatch
    stages = len(plan.stage_to_pp)
    values = plan.schedule.num_units * stages * 2 * (1 + len(plan.skips)) * state.shape.cargo.width
    return (values + 2 * (unit * stages + message.stage)) % (EXCHANGE_TAGS - 1)


def _tags_and_labels(state: MessageState, value: Value, index: int) -> list[tuple[int, Label]]:
    """Return (tag, label) of each tensor of a value: the same on both ends, but for the label's index.

    Tags count through units, stages, kinds of values and tensors, so that no two values of a step share one, unless
    there are more than `EXCHANGE_TAGS`.
    """
    plan, cargo, unit, kind = state.flows.plan, state.shape.cargo, unit_of(value), value.kind
    lane, place = int(kind in (ValueKind.OUTPUT_GRAD, ValueKind.SKIP_GRAD)), 0
    if kind in SKIPS:
        place = value.number % MAX_SKIPS
        lane += 2 * (1 + place)
    first = ((unit * len(plan.stage_to_pp) + value.stage) * 2 * (1 + len(plan.skips)) + lane) * cargo.width
    at = value.stage, *divmod(unit, plan.schedule.slices)
    numbers = range(len(cargo.specs(value)))
    return [((first + k) % EXCHANGE_TAGS, Label(_KINDS[kind], *at, place + k, index)) for k in numbers]
