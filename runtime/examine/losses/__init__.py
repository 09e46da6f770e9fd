"""Reductions of losses and metrics (sum, or mean over what), found by experiment and checked on real microbatches.

Imports what `examine` may, and `function_state`.

watched_loss        a loss or metric: examined at its first call, and watched from then on
loss_weights        possible reductions of a loss, and the weight of a microbatch by them
loss_examination    experiments with unlike parts of a few samples (`loss_parts`): values and gradients; operators
                    it calls (`trial_call_modes`), state that its own calls write (`losses_with_state`)
stated_weights      the same for losses that return (sum, weight); `metric_examination`: by values alone
real_batches        a step's own microbatches, compared with the reduction found; `loss_value_checks`: by values alone
"""
