"""Training state of a rank: weights, gradients in buckets and optimizer state, full or sharded; saving and loading it.

`training_state` combines all of it. `grad_buckets` groups gradients for reduction, `grad_hooks` fills the buckets
with what backwards have left, `grad_reducer` reduces them, `grad_norm` measures and clips.
`zero_shards` has sharded weights, `master_weights` the float32 copies. Imports `stage`, `optim`, `parallel`, `blocks`,
`comm`, `autograd`.
"""
