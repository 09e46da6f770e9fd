"""Leaf tensors: the inputs of a stage, detached, at which its autograd graph begins.

receive buffer ──▶ detached ──▶ leaf ──▶ blocks ──▶ …          a new tensor for each unit: user code may keep it
                                  └──────▶ gradient            stages of torch modules alone: one leaf per buffer
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from quintsched.ir import instruction_set as ins
from quintsched.ir.instruction_values import Value, ValueKind

from ...blocks.trees import DIFFERENTIABLE
from ...stage.stage_forward import Outputs
from ..instruction_state import ComputeState


class Leaves(NamedTuple):
    """A function that makes inputs leaves of a forward's graph; may they stay so, unless one of these dicts is filled?

    An input received into a stage of torch modules alone, whose code cannot keep it, stays one leaf for all units, as
    long as it has neither a gradient nor hooks.
    """

    make: Callable[[Outputs], Outputs]
    may_stay: bool
    hooks: list[dict[int, object]]


def leaves_of(state: ComputeState, instruction: ins.Fwd, kept: Value) -> Leaves:
    """Return how inputs become leaves."""
    leaf, forward = _leaf_maker(state, instruction, kept), state.forwards[instruction.stage]
    taken = state.flows.taken(instruction, ValueKind.OUTPUT, ValueKind.SKIP)
    stays = len(taken) == 1 and state.cells.cell_of(taken[0]).receive is not None and not state.moved.moves(kept)
    stays = stays and forward.is_of_torch and len(forward.arriving.specs) == 1
    return Leaves(lambda given: tuple([leaf(one) for one in given]), stays, forward.hooks if stays else [])


def _leaf_maker(state: ComputeState, instruction: ins.Fwd, kept: Value) -> Callable[[Tensor], Tensor]:
    """Return a function that makes an input a leaf of the forward's graph, with `requires_grad` if it is possible.

    The leaf is a new tensor object: user code may compare it by identity (`mask is self.mask`), so that a tensor whose
    memory is received into again must not be passed twice.
    Where activations leave the rank's memory, it is a copy of a received tensor, as the buffer serves other messages. A
    skip may be in such a buffer too, when an earlier stage of this rank has passed it on.
    """
    differentiable = DIFFERENTIABLE
    stage, constant = instruction.stage, state.boundaries.constant
    if not state.moved.moves(kept):
        return lambda t: t.detach().requires_grad_(stage not in constant) if t.dtype in differentiable else t.detach()
    taken = state.flows.taken(instruction, ValueKind.OUTPUT, ValueKind.SKIP)
    in_buffer = any(value.kind is ValueKind.SKIP or state.cells.cell_of(value).receive is not None for value in taken)

    def own_leaf(tensor: Tensor) -> Tensor:
        leaf = tensor.detach().clone() if in_buffer else tensor.detach()
        return leaf.requires_grad_(stage not in constant) if leaf.dtype in differentiable else leaf

    return own_leaf
