"""Extras of a unit, as the blocks of a stage get them: those of the batch, and what the engine adds.

batch.extras[unit] ──▶ + context of a cut sequence, or keys and values of earlier slices
                   ──▶ + targets, for blocks that take them ──▶ + the key of the unit's random draws
"""

from __future__ import annotations

from collections.abc import Callable

from quintsched.ir import instruction_set as ins

from ...autograd.slice_kv_cache import Past, Store
from ...blocks.block_builders import TARGETS
from ...parallel.mesh_independent_dropout import MaskUnit
from ...stage.stage_forward import UNIT, Extras, Outputs
from ..instruction_state import ComputeState


def extras_maker(state: ComputeState, instruction: ins.Fwd) -> Callable[[Outputs], Extras] | None:
    """Return a function that makes a stage's extras, given its inputs; None where they are those of the batch.

    It adds the targets, for blocks that take them, and the past keys and values of a slice, or the context of a cut
    sequence.
    """
    stage, unit, current = instruction.stage, instruction.microbatch, state.current
    if state.forwards[stage].takes_targets:
        extras_of = _extras_of_unit(state, instruction) or (lambda given: current.batch.extras[unit])
        return lambda given: {**extras_of(given), TARGETS: current.batch.targets[unit]}
    return _extras_of_unit(state, instruction)


def _extras_of_unit(state: ComputeState, instruction: ins.Fwd) -> Callable[[Outputs], Extras] | None:
    stage, unit, current = instruction.stage, instruction.microbatch, state.current
    slices, stores = state.flows.plan.schedule.slices, state.stores
    if state.shape.context is not None:

        def with_context(given: Outputs) -> Extras:
            shape = current.units.shapes[unit]
            assert shape is not None
            return {**current.batch.extras[unit], "context": shape.context}

        return with_context
    if slices == 1:
        return None
    store_key, number, token_shards = state.store_key(stage, unit), unit % slices, state.token_shards.get(stage, 1)

    def extras(given: Outputs) -> Extras:
        if number == 0:
            stores[store_key] = Store()
        past = Past(stores[store_key], number, slices, given[0].shape[1] * token_shards)
        return {**current.batch.extras[unit], "past": past}

    return extras


def draw_key_adder(state: ComputeState, instruction: ins.Fwd) -> Callable[[Extras], Extras]:
    """Return a function that adds the key of a unit's random draws to the extras: step, samples, positions, run.

    The step of an evaluation is -1 - (training steps made), so that it draws other numbers than training steps.
    """
    current, trains = state.current, state.flows.trains
    slices, unit, device = state.flows.plan.schedule.slices, instruction.microbatch, state.device

    def with_draw_key(extras: Extras) -> Extras:
        shape, samples = current.units.shapes[unit], current.units.samples[unit]
        assert shape is not None
        step = current.number if trains else -1 - current.number
        positions = shape.positions(unit % slices, slices, device)
        before = current.samples_before
        samples = range(before + samples.start, before + samples.stop)
        return {**extras, UNIT: MaskUnit(step, samples, positions, current.runs)}

    return with_draw_key
