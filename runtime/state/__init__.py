"""What training keeps: weights, gradients in buckets, optimizer state, sharded or not, and how it is saved and loaded.

`grad_reducer` sums gradients over replicas, `zero_params` and `zero_grads` hold shards of what others gather,
`master_weights` are the float32 ones. Imports `stage`, `parallel`, `blocks`, `comm`.
"""
