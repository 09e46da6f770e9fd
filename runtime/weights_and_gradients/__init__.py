"""Weights, gradients in buckets and optimizer state of a rank, full or sharded: its training state.

`training_state` combines all of it. `grad_buckets` groups gradients for reduction, `grad_hooks` fills the buckets with
what backwards have left, `reduce_grad_buckets` reduces them, `grad_norm` measures and clips. `zero_shards` has
sharded weights, `master_weights` the float32 copies. Imports `stage`, `optim`, `parallel`, `blocks`, `comm`,
`autograd`.
"""
