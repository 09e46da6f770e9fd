"""Handlers of instructions.

Read `calls_bound_to_shapes`, `graph_leaves` and `extra_block_inputs` before `forward_handlers`.

Imports `instruction_state`, `values_between_instructions`, `step_losses`, `busy_clock`, `errors_with_rank_and_stage`.

Fwd        input ──▶ output, or loss          saved: the input, and the roots of the backward
Bwd        ∂output ──▶ ∂input, ∂weights
BwdInput   ∂output ──▶ ∂input                 pending: operands of the products that give the weight gradients
BwdWeight  products ──▶ ∂weights
Overlap    a Fwd and a Bwd, each running while the other waits for a collective inside its stage
"""
