"""Leaves: what a stage is given, as its graph begins with it.

receive buffer ──▶ detached ──▶ leaf ──▶ blocks ──▶ …          made anew for each unit, which code may go by
                                  └──────▶ gradient            of stages of torch alone: once for each buffer
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quintsched.ir import instructions as ins
from quintsched.ir.values import Kind, Value

from ...blocks.trees import DIFFERENTIABLE
from ...stage.stage_forward import Outputs
from ..rank_state import ComputeState


def leaves_maker(state: ComputeState, instruction: ins.Fwd, kept: Value) -> Callable[[Outputs], Outputs]:
    """Return what makes inputs leaves of the forward's graph.

    Where one comes from another rank into a stage of torch alone, whose code cannot keep it, it is a leaf for good.
    """
    leaf, forward = _leaf_maker(state, instruction, kept), state.forwards[instruction.stage]
    taken, constant = state.flows.taken(instruction, Kind.OUTPUT, Kind.SKIP), state.boundaries.constant
    known: Outputs | None = None
    found: Outputs = ()
    if state.host.moves(kept) or not forward.is_of_torch or len(taken) != 1 or state.cells.of(taken[0]).receive is None:
        return lambda given: tuple([leaf(one) for one in given])
    hooks = forward.hooks

    def keep(given: Outputs) -> Outputs:
        nonlocal known, found
        is_same = given is known and not constant and not any(hooks)
        for one in found:  # it may have a gradient by now, or somebody's hooks
            is_same = is_same and one.grad is None and one._backward_hooks is None
        if not is_same:
            found = tuple([leaf(one) for one in given])
            known = None if constant or any(hooks) else given
        return found

    return keep


def _leaf_maker(state: ComputeState, instruction: ins.Fwd, kept: Value) -> Callable[[Tensor], Tensor]:
    """Return what makes an input a leaf of the forward's graph, which gets a gradient if it can.

    It is an object of its own: tensors that others come into later are never given to code twice, which may go by what
    it was given before (`mask is self.mask`).
    Where activations go to the host it is a copy of what another rank has sent: the buffer serves other messages. What
    is taken of a skip may be in such a buffer too, when an earlier stage of this rank has handed it on.
    """
    differentiable = DIFFERENTIABLE
    stage, constant = instruction.stage, state.boundaries.constant
    if not state.host.moves(kept):
        return lambda t: t.detach().requires_grad_(stage not in constant) if t.dtype in differentiable else t.detach()
    taken = state.flows.taken(instruction, Kind.OUTPUT, Kind.SKIP)
    in_buffer = any(value.kind is Kind.SKIP or state.cells.of(value).receive is not None for value in taken)

    def own_leaf(tensor: Tensor) -> Tensor:
        leaf = tensor.detach().clone() if in_buffer else tensor.detach()
        return leaf.requires_grad_(stage not in constant) if leaf.dtype in differentiable else leaf

    return own_leaf
