"""Handlers of sharded weights and gradients (ZeRO), and the waits of computations for them.

GatherParams ──── starts ──▶ … ──▶ the stage's next computation waits        FreeParams frees
AllGatherBucket ─ starts ──▶ … ──▶ the stage's first computation of the next step waits
where a reduction frees full gradients, a backward first finishes pending reductions, then allocates its gradients
"""

from __future__ import annotations

from functools import partial

from quintsched.ir import instruction_set as ins

from ...comm.overlap_threads import BoundCall
from ..instruction_state import ZeroState
from .calls_bound_to_shapes import in_turn


def bind_gather_params(state: ZeroState, index: int, instruction: ins.GatherParams) -> BoundCall:
    """Start to all-gather a stage's full weights; first finish reductions, which frees full gradients."""
    weights, reducer, stage = state.weights, state.gradients.reducer, instruction.stage
    wait = state.waits.waiter(index)

    def run() -> None:
        reducer.finish_reductions(wait)
        weights.gather(stage)

    return run


def bind_free_params(state: ZeroState, index: int, instruction: ins.FreeParams) -> BoundCall:
    """Free a stage's full weights."""
    return partial(state.weights.free, instruction.stage, state.waits.waiter(index))


def bind_all_gather_bucket(state: ZeroState, index: int, instruction: ins.AllGatherBucket) -> BoundCall:
    """Start to all-gather the full weights of a bucket, after each replica has stepped its shard."""
    weights, reducer = state.weights, state.gradients.reducer

    def run() -> None:
        if not reducer.accumulates:
            weights.gather(instruction.stage, instruction.bucket)

    return run


def with_full_weights(state: ZeroState, index: int, instruction: ins.Instruction, call: BoundCall) -> BoundCall:
    """Return a computation preceded by waits for the full weights and gradients that it uses."""
    weights, reducer = state.weights, state.gradients.reducer
    if not weights:
        return call
    wait, first = state.waits.waiter(index), list[BoundCall]()
    for side in instruction.sides:
        if isinstance(side, ins.NEEDS_WEIGHTS):
            first.append(partial(weights.wait_gather, side.stage, wait))
        if reducer.reshards and isinstance(side, ins.ENDS_BACKWARD):
            first.append(partial(reducer.allocate_full, side.stage, wait))  # finishes reductions too
        elif reducer.reshards and isinstance(side, ins.BEGINS_BACKWARD):
            first.append(partial(reducer.finish_reductions, wait))
    return in_turn(*first, call)
