"""The interpreter: a program is bound once to a flat list of calls, and then walked in a loop.

    program   Fwd(0, 0)      SendAct(0, 0, 1)    Bwd(0, 0)  …
                 │ HANDLERS[Fwd](state, 0, Fwd(0, 0)) ─▶ a function without arguments
    calls     [ train,        run,                run,      … ]         for call in calls: call()
                 └ before each call its index in the program is published, for hang detection (`watch`)

One small function per instruction: `handlers` has those of forwards and backwards, of the step's end and of ZeRO,
`offload_instructions` those of offloaded activations; each is bound to its view of the rank's state. `send_and_receive`
decides where a receive is posted and a send issued, which need not be at its index in the program; `lend_instructions`
does so for lent activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any, Protocol, TypeVar

from torch import Tensor

from quintsched.ir import instruction_set as ins
from quintsched.ir.instruction_set import Instruction

from ..comm.overlap_threads import BoundCall
from ..comm.torch_process_groups import as_stall
from ..stage.batches.microbatches import Batch
from ..step_setup.unit_samples import Units
from ..watch.position_in_shared_memory import INDEX, NOWHERE
from .errors_with_rank_and_stage import explained
from .handlers.backward_handlers import bind_bwd, bind_bwd_input, bind_bwd_weight, bind_overlap, bind_recompute
from .handlers.calls_bound_to_shapes import bound
from .handlers.forward_handlers import bind_fwd
from .handlers.step_end_handlers import (
    ClipHalves,
    bind_clip_grad,
    bind_opt_step,
    bind_reduce_bucket,
    bind_share_metrics,
    bind_sync_tied,
    halves_of_clip,
)
from .handlers.zero_handlers import bind_all_gather_bucket, bind_free_params, bind_gather_params, with_full_weights
from .instruction_state import MessageState, RankState
from .lend_instructions import bind_loans
from .offload_instructions import bind_fetch_act, bind_offload_act, with_room
from .send_and_receive import bind_receives, bind_sends, post_all
from .trace_recorder import Recorder

ALL_CALLS = slice(None)

BoundCalls = list[BoundCall]
BoundInstruction = tuple[int, int, BoundCall]
"""(place published before the call, index of its instruction, the call)."""
Handler = tuple[Callable[[RankState], Any], Callable[[Any, int, Any], BoundCall]]
"""The view of the rank's state that an instruction is bound to, and the function that binds it."""
View = TypeVar("View")


def _seeing(
    view: Callable[[RankState], View], binds: Mapping[type[Instruction], Callable[[View, int, Any], BoundCall]]
) -> dict[type[Instruction], Handler]:
    """Return (view, bind) for each kind of instruction in `binds`, all of which are bound to the same view."""
    return {kind: (view, bind) for kind, bind in binds.items()}


HANDLERS: dict[type[Instruction], Handler] = {
    **_seeing(
        attrgetter("compute"),
        {
            ins.Fwd: bind_fwd,
            ins.Recompute: bind_recompute,
            ins.Bwd: bind_bwd,
            ins.BwdInput: bind_bwd_input,
            ins.BwdWeight: bind_bwd_weight,
            ins.Overlap: bind_overlap,
        },
    ),
    **_seeing(
        attrgetter("compute.moved"),
        {
            ins.OffloadAct: bind_offload_act,
            ins.FetchAct: bind_fetch_act,
        },
    ),
    **_seeing(
        attrgetter("step_end"),
        {
            ins.SyncTied: bind_sync_tied,
            ins.AllReduceBucket: bind_reduce_bucket,
            ins.ReduceScatterBucket: bind_reduce_bucket,
            ins.ShareMetrics: bind_share_metrics,
            ins.ClipGrad: bind_clip_grad,
            ins.OptStep: bind_opt_step,
        },
    ),
    **_seeing(
        attrgetter("zero"),
        {
            ins.AllGatherBucket: bind_all_gather_bucket,
            ins.GatherParams: bind_gather_params,
            ins.FreeParams: bind_free_params,
        },
    ),
}
"""Handler of each instruction; messages are bound together, by `bind_receives`, `bind_sends`, `bind_loans`."""


class Observer(Protocol):
    """Wraps every call of a program: a trace, a memory count."""

    def wrap(self, index: int, call: BoundCall) -> BoundCall:
        """Return the replacement of `call`, one of the calls of instruction `index`."""


class Interpreter:
    """Runs one rank's program on its state; `recorder` traces when each instruction ran."""

    def __init__(self, state: RankState, recorder: Recorder | None = None) -> None:
        self.state = state
        self._recorder = recorder
        self._program = state.flows.program
        places = sorted(self._bind(), key=itemgetter(0, 1))
        self._places = [index for _, _, index, _ in places]
        self._marks = [place for place, _, _, _ in places]
        self._publisher = state.messages.transport.publisher
        self.announce = partial(self._publisher.walk, state.flows.plan)
        """Publishes to the watch that a step of this program begins."""
        self._calls = [call for _, _, _, call in places]
        self._entries = _merged(state.messages, list(zip(self._marks, self._places, self._calls, strict=True)))
        self._bound: list[BoundInstruction] = []
        self._bound_to: tuple[Any, ...] = ()
        forwards = [*state.compute.forwards.values()]
        self._masks, self._hooks = forwards[0].draws.masks, [hooks for forward in forwards for hooks in forward.hooks]
        if recorder is not None:
            recorder.forget_calls()
        self._recorded = self.watched(recorder) if recorder else []

    def _bind(self) -> list[tuple[int, int, int, BoundCall]]:
        """Return (place, order at this place, index, call) for every call of the program.

        At one place, receives are posted first, then sends that were ready earlier, then the instruction itself.
        """
        received = [(posting.at, 0, posting.index, call) for posting, call in bind_receives(self.state.messages)]
        sent = [(place, 1, index, call) for place, index, call in bind_sends(self.state.messages)]
        lent = [(place, 1, index, call) for place, index, call in bind_loans(self.state)]
        others = [
            (index, 2, index, self._handle(index, instruction))
            for index, instruction in enumerate(self._program)
            if not isinstance(instruction, ins.Message)
        ]
        return [*received, *sent, *lent, *others]

    def _handle(self, index: int, instruction: Instruction) -> BoundCall:
        view, bind = HANDLERS[type(instruction)]
        call = bind(view(self.state), index, instruction)
        if not instruction.computes:
            return call
        call = with_full_weights(self.state.zero, index, instruction, call)
        return with_room(self.state.compute.moved, index, call)

    def watched(self, observer: Observer) -> list[BoundCall]:
        """Return the calls, each wrapped by an observer."""
        return [observer.wrap(index, call) for index, call in zip(self._places, self._calls, strict=True)]

    def records(self, step: int) -> bool:
        """Whether a step, counted from the start of the run, is traced."""
        return self._recorder is not None and self._recorder.wants(step)

    def run_program(self, batch: Batch, step: int, calls: BoundCalls | None = None) -> None:
        """Walk the program once; `calls` replace the bound calls, untraced. `step` counts from the start of the run."""
        self.state.begin_step(batch)  # may wait for sends of the program that ran before
        self.announce()
        recorder = self._recorder if calls is None else None
        if recorder is not None and recorder.begin_step(step):
            self.state.waits.recorder, calls = recorder, self._recorded
            self.state.step_end.gradients.reducer.note_start = recorder.note_start
        if calls is None:
            self._walk(self._entries_of_step())
        else:
            self._walk(self._part(calls))
        if self.state.waits.recorder is not None:
            self.state.waits.recorder.end_step()
            self.state.waits.recorder = self.state.step_end.gradients.reducer.note_start = None
        self.state.end_step()

    def _entries_of_step(self) -> list[BoundInstruction]:
        """Return the entries, bound to all that they go by in this step, unless its units have extras."""
        current, masks = self.state.current, self._masks
        if current.batch.extras and current.batch.extras[0]:
            return self._entries
        draws, generation = (masks.alarms, masks.changes), self.state.messages.buffers.generation
        bound_to = current.units, generation, draws, any(self._hooks), *self.state.compute.boundaries.constant
        if bound_to != self._bound_to:
            self._bound_to = bound_to
            calls = [(mark, index, bound(call, current.units)) for mark, index, call in self._entries]
            self._bound = [(mark, index, call) for mark, index, call in calls if call is not None]
        return self._bound

    @cached_property
    def _clip(self) -> tuple[int, ClipHalves]:
        """The position of the plan's `ClipGrad` among the calls, and its two halves."""
        index = next(index for index, one in enumerate(self._program) if isinstance(one, ins.ClipGrad))
        return self._places.index(index), halves_of_clip(self.state.step_end, index)

    def lead(self, batch: Batch) -> Tensor:
        """Walk up to the middle of `ClipGrad`, in a step that reduces gradients; return the figures of its first half.

        All work that the device does without the host lies before it: see `ClipHalves`.
        """
        self.state.begin_step(batch)
        self.announce()
        found: list[Tensor] = []
        clip, halves = self._clip
        measure = lambda: found.append(halves.measure())  # noqa: E731
        self._walk(self._part([*self._calls[:clip], measure], slice(clip + 1)))
        return found[0]

    def conclude(self, figures: Tensor) -> None:
        """Walk from the middle of `ClipGrad` to the end of the step."""
        clip, halves = self._clip
        self._walk(self._part([partial(halves.conclude, figures), *self._calls[clip + 1 :]], slice(clip, None)))
        self.state.end_step()

    def _part(self, calls: Sequence[BoundCall], part: slice = ALL_CALLS) -> list[BoundInstruction]:
        """Return entries of `calls` that replace a part of the bound calls, with their places."""
        return list(zip(self._marks[part], self._places[part], calls, strict=True))

    def _walk(self, entries: Iterable[BoundInstruction]) -> None:
        numbers, index, call = self._publisher.numbers, 0, None
        try:
            for mark, index, call in entries:  # noqa: B007
                numbers[INDEX] = mark
                call()
            numbers[INDEX] = NOWHERE
        except (Exception, SystemExit) as error:
            index = getattr(call, "index", index)
            place, forwards = self.state.flows.place, self.state.compute.forwards
            found = as_stall(error, self._publisher)
            if found is error:
                found = explained(error, self._program[index], index, place, forwards)
            if found is error:
                raise
            raise found from error


def _merged(state: MessageState, entries: Sequence[BoundInstruction]) -> list[BoundInstruction]:
    """Return the entries with consecutive posts of receives at one place merged into one call."""
    found: list[BoundInstruction] = []
    for (place, posts), some in groupby(entries, key=lambda entry: (entry[0], hasattr(entry[2], "receives"))):
        alike = list(some)
        receives = [one for _, _, call in alike for one in getattr(call, "receives", ())]
        found += [(place, alike[0][1], post_all(state, receives))] if posts else alike
    return found


@dataclass(eq=False, slots=True)
class PreparedStep:
    """A batch whose units, shapes and interpreter are settled."""

    batch: Batch
    units: Units
    interpreter: Interpreter

    @property
    def given_targets(self) -> list[Any]:
        """Targets of the units that have samples, as far as this rank has them."""
        return [some for unit, some in enumerate(self.batch.targets) if unit not in self.units.empty]
