"""The interpreter: a program is bound once to a flat list of calls, and each step makes these calls in a loop.

    program   Fwd(0, 0)      SendAct(0, 0, 1)    Bwd(0, 0)  …
                 │ (view, bind) = HANDLERS[Fwd];  bind(view(state), 0, Fwd(0, 0)) ─▶ a function without arguments
    calls     [ run,          issue,              run,      … ]         for call in calls: call()
                 └ before each call its place in the program is published, for hang detection (`watch`)

A `bind_…` function for each instruction: `handlers` has those of forwards and backwards, of the step's end and of ZeRO,
`offload_instructions` those of offloaded activations; each gets its view of the rank's state. `send_and_receive`
decides where a receive is posted and a send issued, which need not be at its index in the program; `lend_instructions`
does so for lent activations. A call therefore has a place, where it is made, and the index of its instruction.

Words of this package (`docs/glossary.md` has the others):

    unit      a microbatch or, where sequences are sliced, one slice of it: the field `microbatch` of an instruction
    row       the tensors of a stage's input or output, in one order: those of a block's output, then riders and skips
    Parcel    the specs (shape, dtype) of a row; a `Cargo` has those of all messages of a plan
    extras    arguments of blocks besides their input, by name: masks, positions, …
    place     of a call, the index in the program at which it is made; of a tensor, its index in a row
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
from .errors_with_rank_and_stage import with_location
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
from .instruction_state import MessageState, RunState
from .lend_instructions import bind_loans
from .offload_instructions import after_frees, bind_fetch_act, bind_offload_act
from .send_and_receive import PostReceives, bind_receives, bind_sends
from .trace_recorder import Recorder

BoundCalls = list[BoundCall]
BoundInstruction = tuple[int, int, BoundCall]
"""(place published before the call, index of its instruction, the call)."""
Handler = tuple[Callable[[RunState], Any], Callable[[Any, int, Any], BoundCall]]
"""The view of the rank's state that an instruction is bound to, and the function that binds it."""
View = TypeVar("View")


def _with_view(
    view: Callable[[RunState], View], binds: Mapping[type[Instruction], Callable[[View, int, Any], BoundCall]]
) -> dict[type[Instruction], Handler]:
    """Return (view, bind) for each kind of instruction in `binds`, all of which are bound to the same view."""
    return {kind: (view, bind) for kind, bind in binds.items()}


HANDLERS: dict[type[Instruction], Handler] = {
    **_with_view(
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
    **_with_view(
        attrgetter("compute.moved"),
        {
            ins.OffloadAct: bind_offload_act,
            ins.FetchAct: bind_fetch_act,
        },
    ),
    **_with_view(
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
    **_with_view(
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
    """Runs one rank's program on its state; `recorder` traces when each instruction ran.

    Lists of its calls, and the steps that are run by each:

        _calls       in order, one or more per instruction     CUDA graphs: step 2, capture, comparison, end of replay
        _recorded    `_calls`, wrapped by the recorder         traced steps; for other observers, see `wrapped_by`
        _merged      posts of receives at one place as one     steps with extras, which may differ at any time
        _bound       `_merged`, bound to the units of a step   all other steps: calls that repeat no lookup of shapes
    """

    def __init__(self, state: RunState, recorder: Recorder | None = None) -> None:
        self.state = state
        self._recorder = recorder
        self._program = state.flows.program
        self._publisher = state.messages.transport.publisher
        self.announce = partial(self._publisher.walk, state.flows.plan)  # to the watch: a step of this program begins
        in_order = sorted(self._bind(), key=itemgetter(0, 1))
        self._calls: list[BoundInstruction] = [(place, index, call) for place, _, index, call in in_order]
        self._merged = _merged(state.messages, self._calls)
        self._bound: list[BoundInstruction] = []
        self._bound_to: tuple[Any, ...] = ()
        forwards = [*state.compute.forwards.values()]
        self._masks, self._hooks = forwards[0].draws.masks, [hooks for forward in forwards for hooks in forward.hooks]
        if recorder is not None:
            recorder.forget_calls()
        self._recorded = self.wrapped_by(recorder) if recorder else []

    def _bind(self) -> list[tuple[int, int, int, BoundCall]]:
        """Return (place, order at this place, index, call) for every call of the program.

        At one place, receives are posted first, then sends and loans are issued and released, then the instruction at
        this index runs, unless it is a message.
        """
        received = [(posting.place, 0, posting.index, call) for posting, call in bind_receives(self.state.messages)]
        sent = [(place, 1, index, call) for place, index, call in bind_sends(self.state.messages)]
        lent = [(place, 1, index, call) for place, index, call in bind_loans(self.state)]
        others = [
            (index, 2, index, self._bind_call(index, instruction))
            for index, instruction in enumerate(self._program)
            if not isinstance(instruction, ins.Message)
        ]
        return [*received, *sent, *lent, *others]

    def _bind_call(self, index: int, instruction: Instruction) -> BoundCall:
        view, bind = HANDLERS[type(instruction)]
        call = bind(view(self.state), index, instruction)
        if not instruction.computes:
            return call
        call = with_full_weights(self.state.zero, index, instruction, call)
        return after_frees(self.state.compute.moved, index, call)

    def wrapped_by(self, observer: Observer) -> list[BoundCall]:
        """Return the calls, each wrapped by an observer."""
        return [observer.wrap(index, call) for _, index, call in self._calls]

    def records(self, step: int) -> bool:
        """Whether a step, counted from the start of the run, is traced."""
        return self._recorder is not None and self._recorder.wants(step)

    def run_program(self, batch: Batch, step: int, calls: BoundCalls | None = None) -> None:
        """Run the program once.

        State is not restored where a call raises, as `PlanRunner.is_broken` rules out further steps.

        Args:
            batch: the batch, whose units are in `state.current`.
            step: number of steps before it in this run; -1: it is not traced.
            calls: replace the calls, one by one; such a step is not traced.
        """
        self.state.begin_step(batch)  # may wait for sends of the program that ran before
        self.announce()
        recorder = self._recorder if calls is None else None
        if recorder is not None and recorder.begin_step(step):
            self.state.waits.recorder, calls = recorder, self._recorded
            self.state.step_end.gradients.reducer.note_start = recorder.note_start
        self._run_calls(
            self._calls_of_step()
            if calls is None
            else [(place, index, call) for call, (place, index, _) in zip(calls, self._calls, strict=True)]
        )
        if self.state.waits.recorder is not None:
            self.state.waits.recorder.end_step()
            self.state.waits.recorder = self.state.step_end.gradients.reducer.note_start = None
        self.state.end_step()

    def _calls_of_step(self) -> list[BoundInstruction]:
        """Return the calls bound to the units of this step, and to all else that they depend on; see the class."""
        current, masks = self.state.current, self._masks
        if current.batch.extras and current.batch.extras[0]:
            return self._merged
        draws, generation = (masks.alarms, masks.changes), self.state.messages.buffers.generation
        bound_to = current.units, generation, draws, [*map(bool, self._hooks)], *self.state.compute.boundaries.constant
        if bound_to != self._bound_to:
            self._bound_to = bound_to
            calls = [(place, index, bound(call, current.units)) for place, index, call in self._merged]
            self._bound = [(place, index, call) for place, index, call in calls if call is not None]
        return self._bound

    @cached_property
    def _clip(self) -> tuple[int, ClipHalves]:
        """The position of the plan's `ClipGrad` among `_calls`, and its two halves."""
        indices = [index for _, index, _ in self._calls]
        index = next(index for index in indices if isinstance(self._program[index], ins.ClipGrad))
        return indices.index(index), halves_of_clip(self.state.step_end, index)

    def run_until_norm(self, batch: Batch) -> Tensor:
        """Run a step that does not accumulate, up to the middle of `ClipGrad`; return the figures of `measure`.

        Up to there the host reads nothing from the device, so that a CUDA graph can hold it: see `ClipHalves`.
        """
        self.state.begin_step(batch)
        self.announce()
        found: list[Tensor] = []
        clip, halves = self._clip
        place, index, _ = self._calls[clip]
        self._run_calls([*self._calls[:clip], (place, index, lambda: found.append(halves.measure()))])
        return found[0]

    def run_after_norm(self, figures: Tensor) -> None:
        """Run from the middle of `ClipGrad` to the end of the step."""
        clip, halves = self._clip
        place, index, _ = self._calls[clip]
        self._run_calls([(place, index, partial(halves.clip, figures)), *self._calls[clip + 1 :]])
        self.state.end_step()

    def _run_calls(self, calls: Iterable[BoundInstruction]) -> None:
        """Make calls, and publish the place of each before it; an error is raised anew with rank and instruction."""
        numbers, index, call = self._publisher.numbers, 0, None
        try:
            for place, index, call in calls:  # noqa: B007
                numbers[INDEX] = place
                call()
            numbers[INDEX] = NOWHERE
        except (Exception, SystemExit) as error:
            index = call.index if isinstance(call, PostReceives) else index
            found = as_stall(error, self._publisher)
            if found is error:
                rank, forwards = self.state.flows.rank_in_words, self.state.compute.forwards
                found = with_location(error, self._program[index], index, rank, forwards)
            if found is error:
                raise
            raise found from error


def _merged(state: MessageState, calls: Sequence[BoundInstruction]) -> list[BoundInstruction]:
    """Return the calls with consecutive posts of receives at one place merged into one call."""
    found: list[BoundInstruction] = []
    for (place, posts), some in groupby(calls, key=lambda one: (one[0], isinstance(one[2], PostReceives))):
        alike = list(some)
        receives = [one for _, _, call in alike if isinstance(call, PostReceives) for one in call.receives]
        found += [(place, alike[0][1], PostReceives(state, receives))] if posts else alike
    return found


@dataclass(eq=False, slots=True)
class PreparedStep:
    """A batch whose units, shapes and interpreter are settled."""

    batch: Batch
    units: Units
    interpreter: Interpreter

    @property
    def given_targets(self) -> list[Any]:
        """Targets of the units that are not skipped, as far as this rank has them."""
        return [some for unit, some in enumerate(self.batch.targets) if unit not in self.units.empty]
