"""The interpreter: a program is resolved once into a flat list of bound calls, and then just walked.

    program   Fwd(0, 0)      SendAct(0, 0, 1)    Bwd(0, 0)  …
                 │ HANDLERS[Fwd](machine, 0, Fwd(0, 0)) ─▶ a function without arguments
    calls     [ train,        run,                run,      … ]         for call in calls: call()

One small function per instruction: `compute` has those of forwards and backwards, `finish` those that end a step,
`shared_calls` those of what replicas share out. `messages` says where a receive is posted and a send issued, which need
not be at its own place. A handler asks the planner's data-flow rule what its instruction takes and makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from quintsched.ir import instructions as ins
from quintsched.ir.instructions import Instruction

from ..stage.microbatches import NOTHING, Batch
from .compute import bind_bwd, bind_bwd_input, bind_bwd_weight, bind_fwd, bind_recompute
from .p2p import bind_receives, bind_sends
from .rank_state import Machine
from .recorder import Recorder
from .step_end import (
    bind_clip_grad,
    bind_opt_step,
    bind_reduce_bucket,
    bind_share_metrics,
    bind_sync_tied,
)
from .zero import bind_all_gather_bucket, bind_free_params, bind_gather_params, on_shares

Call = Callable[[], None]

HANDLERS: dict[type[Instruction], Callable[[Machine, int, Any], Call]] = {
    ins.Fwd: bind_fwd,
    ins.Recompute: bind_recompute,
    ins.Bwd: bind_bwd,
    ins.BwdInput: bind_bwd_input,
    ins.BwdWeight: bind_bwd_weight,
    ins.SyncTied: bind_sync_tied,
    ins.AllReduceBucket: bind_reduce_bucket,
    ins.ReduceScatterBucket: bind_reduce_bucket,
    ins.AllGatherBucket: bind_all_gather_bucket,
    ins.GatherParams: bind_gather_params,
    ins.FreeParams: bind_free_params,
    ins.ShareMetrics: bind_share_metrics,
    ins.ClipGrad: bind_clip_grad,
    ins.OptStep: bind_opt_step,
}
"""How each instruction is bound; messages are bound together, by `bind_receives` and `bind_sends`."""


class Observer(Protocol):
    """Somebody who wants to know of every call: a trace, a count of memory."""

    def wrap(self, index: int, call: Call) -> Call:
        """Return what is called instead of `call`, a part of instruction `index`."""


class Interpreter:
    """Runs one rank's program on a machine; `recorder` writes down when each instruction ran."""

    def __init__(self, machine: Machine, rank: int, recorder: Recorder | None = None) -> None:
        self.machine = machine
        self._rank = rank
        self._recorder = recorder
        self._program = machine.plan.program(rank)
        places = sorted(self._bind(), key=lambda placed: placed[:2])
        self._places = [index for _, _, index, _ in places]
        self._calls = [call for _, _, _, call in places]
        self._recorded = self.watched(recorder) if recorder else []

    def _bind(self) -> list[tuple[int, int, int, Call]]:
        """Return (place, order at this place, own index, call) for all there is to do.

        At one place, receives are posted first, then sends that were ready before, then the instruction itself.
        """
        machine, program = self.machine, self._program
        flows = [machine.flow(i) for i in program]
        received = [(posting.at, 0, posting.index, call) for posting, call in bind_receives(machine, program, flows)]
        sent = [(place, 1, index, call) for place, index, call in bind_sends(machine, program, flows)]
        own = [
            (index, 2, index, on_shares(machine, index, instruction, self._handle(index, instruction)))
            for index, instruction in enumerate(program)
            if not isinstance(instruction, ins.Message)
        ]
        return [*received, *sent, *own]

    def _handle(self, index: int, instruction: Instruction) -> Call:
        return HANDLERS[type(instruction)](self.machine, index, instruction)

    def watched(self, observer: Observer) -> list[Call]:
        """Return the calls as somebody sees them who watches each of them."""
        return [observer.wrap(index, call) for index, call in zip(self._places, self._calls, strict=True)]

    def run(self, batch: Batch, step: int, calls: list[Call] | None = None) -> None:
        """Walk the program once; an error gets a note that says where it happened. `calls` take the program's place."""
        recorder = self._recorder
        self.machine.begin(batch)
        if recorder is not None:
            recorder.begin_step(step)
            if recorder.active and calls is None:
                self.machine.recorder, calls = recorder, self._recorded
        place = -1
        try:
            for place, call in enumerate(calls or self._calls):  # noqa: B007
                call()
        except Exception as error:
            where = ", ".join(f"{k}={v}" for k, v in self.machine.plan.mesh.coordinates(self._rank).items())
            index = self._places[max(place, 0)]
            if "leaf Variable that requires grad" in str(error):
                error.add_note(
                    "a stage's first operation must not change its input in place: it belongs to the message"
                )
            error.add_note(f"on rank {self._rank} ({where}), instruction {index}: {self._program[index]}")
            raise
        if self.machine.recorder is not None:
            self.machine.recorder.end_step()
            self.machine.recorder = None
        self.machine.batch = NOTHING
