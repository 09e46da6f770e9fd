"""Handlers of instructions. Imports the interpreter's other files.

Fwd        input ──▶ output, or loss          saved: the roots of the backward
Bwd        ∂output ──▶ ∂input, ∂weights
BwdInput   ∂output ──▶ ∂input                 pending: operands of the weight gradients, not yet computed
BwdWeight  products ──▶ ∂weights
Overlap    a Fwd and a Bwd, each running while the other waits for a collective inside its stage
"""
