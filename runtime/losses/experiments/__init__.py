"""Experiments by which the reduction of a loss or metric is found, with unlike parts of a few samples (`loss_parts`).

find_loss_reduction    values and gradients; operators that it calls (`trial_call_modes`), state that its own calls
                       write (`find_losses_with_state`), tokens that it mixes (`losses_mixing_tokens`)
stated_weights         the same for losses that return (sum, weight); `find_metric_reduction`: by values alone

Imports `blocks`, `comm`, and reductions and states of functions from beside it.
"""
