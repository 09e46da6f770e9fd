"""What users' code is found to do, by experiment, once, before it trains: losses, modes, state, scales.

Each question is asked in one module, of callables and tensors alone, and answered with a fact or with one refusal that
names the line to write. A steady step compares plain values and modules: `followed`, `functions_kept`. What updates of
an optimizer depend on, `optimizers` says.

May import parallel, blocks, data, autograd, agreement, comm; not splitting, stage, steps, nor what is above them.
"""
