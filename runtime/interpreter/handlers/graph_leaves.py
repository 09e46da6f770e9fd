"""Leaf tensors: the inputs of a stage, detached, at which its autograd graph begins.

receive buffer ──▶ detached ──▶ leaf ──▶ blocks ──▶ …          a new tensor for each unit: user code may keep it
                                  └──────▶ gradient            stages of torch modules alone: one leaf per buffer
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quintsched.ir import instruction_set as ins
from quintsched.ir.values import Value, ValueKind

from ...blocks.trees import DIFFERENTIABLE
from ...stage.stage_forward import Outputs
from ..rank_state import ComputeState


def leaves_maker(state: ComputeState, instruction: ins.Fwd, kept: Value) -> Callable[[Outputs], Outputs]:
    """Return a function that makes inputs leaves of the forward's graph.

    An input received into a stage of torch modules alone, whose code cannot keep it, stays one leaf for all units.
    """
    leaf, forward = _leaf_maker(state, instruction, kept), state.forwards[instruction.stage]
    taken, constant = state.flows.taken(instruction, ValueKind.OUTPUT, ValueKind.SKIP), state.boundaries.constant
    known: Outputs | None = None
    found: Outputs = ()
    if (
        state.host.moves(kept)
        or not forward.is_of_torch
        or len(taken) != 1
        or state.cells.cell_of(taken[0]).receive is None
    ):
        return lambda given: tuple([leaf(one) for one in given])
    hooks = forward.hooks

    def keep(given: Outputs) -> Outputs:
        nonlocal known, found
        is_same = given is known and not constant and not any(hooks)
        for one in found:  # it may have a gradient by now, or hooks
            is_same = is_same and one.grad is None and one._backward_hooks is None
        if not is_same:
            found = tuple([leaf(one) for one in given])
            known = None if constant or any(hooks) else given
        return found

    return keep


def _leaf_maker(state: ComputeState, instruction: ins.Fwd, kept: Value) -> Callable[[Tensor], Tensor]:
    """Return a function that makes an input a leaf of the forward's graph, with `requires_grad` if it is possible.

    The leaf is a new tensor object: user code may compare it by identity (`mask is self.mask`), so that a tensor whose
    memory is received into again must not be passed twice.
    Where activations are offloaded, it is a copy of a received tensor, as the buffer serves other messages. A skip may
    be in such a buffer too, when an earlier stage of this rank has passed it on.
    """
    differentiable = DIFFERENTIABLE
    stage, constant = instruction.stage, state.boundaries.constant
    if not state.host.moves(kept):
        return lambda t: t.detach().requires_grad_(stage not in constant) if t.dtype in differentiable else t.detach()
    taken = state.flows.taken(instruction, ValueKind.OUTPUT, ValueKind.SKIP)
    in_buffer = any(value.kind is ValueKind.SKIP or state.cells.cell_of(value).receive is not None for value in taken)

    def own_leaf(tensor: Tensor) -> Tensor:
        leaf = tensor.detach().clone() if in_buffer else tensor.detach()
        return leaf.requires_grad_(stage not in constant) if leaf.dtype in differentiable else leaf

    return own_leaf
