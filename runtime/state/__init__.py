"""What training keeps: weights, gradients in buckets, optimizer state, full or sharded, and how it is saved and loaded.

`training_state` puts all of it together. `grad_buckets` says what is reduced together, `grad_hooks` fills the buckets,
`grad_reducer` adds them up, `grad_norm` measures and clips. `zero_params` has sharded weights,
`master_weights` are the float32 ones. Imports `stage`, `models`, `parallel`, `blocks`, `comm`, `autograd`.
"""
