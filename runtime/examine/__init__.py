"""Examination of user code by experiment, once before it trains: losses, training modes, state, gradients.

Each question has one module, which takes callables and tensors only, and answers with a fact or a refusal that names
the line to change. A steady step compares plain values and modules: `host_state_changes`, `function_state`.
`optimizers` has the inputs of optimizers' updates. May import parallel, blocks, data, autograd, agreement, comm; not
splitting, stage, steps, nor what is above them.
"""
