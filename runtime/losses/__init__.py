"""Losses and metrics: their reductions (sum, or mean over what), and the weight of a microbatch by them.

weighted_losses     a loss whose microbatches add up to the batch; `weighted_metrics`: the same for metrics
watched_loss        a loss or metric: examined at its first call (`experiments`), and watched from then on
loss_reductions     possible reductions, and the weight of a microbatch by them
recheck_reduction_on_batches    a step's own microbatches, compared with the reduction found
recheck_reduction_by_values     the same in every step, by values alone

Imports `user_objects`, `blocks`, `comm` and `settings`.
"""
