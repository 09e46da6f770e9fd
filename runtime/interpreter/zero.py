"""What the plan says of weights and gradients that replicas share out (ZeRO), and who waits for them.

GatherParams ── begins ──▶ … ──▶ the stage's next computation waits        FreeParams drops
AllGatherBucket ─ begins ─▶ … ──▶ the next step's first computation waits
a backward takes in what has been reduced, and makes room for full gradients
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from quintsched.ir import instructions as ins

from .rank_state import Machine

Call = Callable[[], None]


def bind_gather_params(machine: Machine, index: int, instruction: ins.GatherParams) -> Call:
    """Begin to make a stage's weights whole, in the room of full gradients that have been reduced."""
    weights, gradients, stage = machine.weights, machine.gradients, instruction.stage
    assert weights is not None
    assert gradients is not None
    wait = partial(machine.wait, index=index)

    def run() -> None:
        gradients.collect(wait)
        weights.gather(stage)

    return run


def bind_free_params(machine: Machine, index: int, instruction: ins.FreeParams) -> Call:
    """Drop a stage's whole weights."""
    assert machine.weights is not None
    return partial(machine.weights.free, instruction.stage, partial(machine.wait, index=index))


def bind_all_gather_bucket(machine: Machine, index: int, instruction: ins.AllGatherBucket) -> Call:
    """Begin to make the weights of a bucket whole, after everybody has stepped a share."""
    assert machine.weights is not None
    return partial(machine.weights.gather, instruction.stage, instruction.bucket)


def on_shares(machine: Machine, index: int, instruction: ins.Instruction, call: Call) -> Call:
    """Return `call` so that the weights and gradients that its computation works on stand before it."""
    weights, gradients = machine.weights, machine.gradients
    if weights is None or not isinstance(instruction, ins.Compute):
        return call
    wait, stage = partial(machine.wait, index=index), instruction.stage
    first: list[Call] = []
    if isinstance(instruction, ins.NEEDS_WEIGHTS):
        first.append(partial(weights.wait, stage, wait))
    if gradients is not None and gradients.come_and_go:
        if isinstance(instruction, ins.BEGINS_BACKWARD):
            first.append(partial(gradients.collect, wait))
        if isinstance(instruction, ins.ENDS_BACKWARD):
            first.append(partial(gradients.make_room, stage, wait))

    def run() -> None:
        for prepare in first:
            prepare()
        call()

    return run
