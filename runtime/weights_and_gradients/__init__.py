"""Weights, gradients in buckets and optimizer state of a rank, full or sharded: its training state.

`training_state` combines all of it. `grad_buckets` groups gradients for reduction, `hooks_that_fill_buckets` copies or
adds gradients to the buckets after backwards, `launch_bucket_reductions` reduces them, `grad_norm` measures and clips.
`zero_shards` has sharded weights, `master_weights` the float32 copies. Imports `stage`, `optim`, `parallel`, `blocks`,
`comm`, `autograd`.
"""
