"""What a user's losses and metrics are over, found by experiment, and compared with real microbatches ever after.

Imports what `examine` may, and the state of functions from beside it.

examined        one of them: examined when it is first called, and watched from then on
loss_weights    what a loss may be over, and what a microbatch weighs by it
examination     experiments with unlike parts of a few samples (`parts`): values and gradients; what it calls
                (`calls_checked`), what its own calls write (`own_writes`)
stated          the same of what gives (sum, weight); `metrics`, of values alone
real_batches    a step's own microbatches, compared with what was found; `values`, in every step, by values alone
"""
