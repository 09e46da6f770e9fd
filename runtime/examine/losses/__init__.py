"""Reductions of losses and metrics (sum, or mean over what), found by experiment and checked on real microbatches.

Imports what `examine` may, and the state of functions from beside it.

examined        a loss or metric: examined at its first call, and watched from then on
loss_weights    possible reductions of a loss, and the weight of a microbatch by them
examination     experiments with unlike parts of a few samples (`parts`): values and gradients; operators it calls
                (`calls_checked`), state that its own calls write (`own_writes`)
stated          the same for losses that return (sum, weight); `metrics`: by values alone
real_batches    a step's own microbatches, compared with the reduction found; `values`: in every step, by values alone
"""
