"""Instructions bound to functions: `forward`, `backward`, `zero`, `step_end`. Imports the interpreter's other files.

Fwd        input ──▶ output, or loss          saved: where the backward starts
Bwd        ∂output ──▶ ∂input, ∂weights
BwdInput   ∂output ──▶ ∂input                 pending: the weight gradients' products, not yet computed
BwdWeight  products ──▶ ∂weights
Overlap    a Fwd and a Bwd, each while the other waits for what it exchanges inside its stage
"""
