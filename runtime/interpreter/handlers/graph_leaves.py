"""Leaf tensors: the inputs of a stage, detached, at which its autograd graph begins.

receive buffer ──▶ detached ──▶ leaf ──▶ blocks ──▶ …          a new tensor in each step: user code may keep it
                                  └──────▶ gradient            stages of torch modules alone: one for all steps
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
    """Function that makes inputs the leaves of a forward's graph, and whether the same leaves serve all steps.

    They do where the input is a single received tensor and the stage consists of torch modules alone, whose code cannot
    keep a reference to it.

    Attributes:
        make: returns inputs as leaves.
        may_stay: whether the leaves of a receive buffer may be used again, unless one of `hooks` has entries.
        hooks: the hook dicts of the stage's modules: a hook is user code, which might keep a leaf.
    """

    make: Callable[[Outputs], Outputs]
    may_stay: bool
    hooks: list[dict[int, object]]


def leaves_of(state: ComputeState, instruction: ins.Fwd, kept: Value) -> Leaves:
    """Return the leaves of a forward; `kept` is the state that it saves for its backward."""
    make_leaf, forward = _leaf_maker(state, instruction, kept), state.forwards[instruction.stage]
    taken = state.flows.taken(instruction, ValueKind.OUTPUT, ValueKind.SKIP)
    stays = len(taken) == 1 and state.cells.cell_of(taken[0]).receive is not None and not state.moved.moves(kept)
    stays = stays and forward.is_of_torch and len(forward.arriving.specs) == 1
    return Leaves(lambda given: tuple([make_leaf(one) for one in given]), stays, forward.hooks if stays else [])


def _leaf_maker(state: ComputeState, instruction: ins.Fwd, kept: Value) -> Callable[[Tensor], Tensor]:
    """Return a function that makes an input a leaf; if its dtype allows it, it requires a gradient as in one process.

    The leaf is a new tensor object: user code may compare it by identity (`mask is self.mask`), so that a tensor whose
    memory is received into again must not be passed twice.

    Where activations leave the rank's memory, the leaf of a received tensor is a copy, as the buffer receives other
    messages meanwhile. A skip may be in such a buffer too, when an earlier stage of this rank has passed it on.
    """
    stage, constant, differentiable = instruction.stage, state.boundaries.constant, DIFFERENTIABLE
    in_buffer = state.moved.moves(kept) and any(
        value.kind is ValueKind.SKIP or state.cells.cell_of(value).receive is not None
        for value in state.flows.taken(instruction, ValueKind.OUTPUT, ValueKind.SKIP)
    )

    def make_leaf(tensor: Tensor) -> Tensor:
        leaf = tensor.detach().clone() if in_buffer else tensor.detach()
        return leaf.requires_grad_(stage not in constant) if leaf.dtype in differentiable else leaf

    return make_leaf
