"""Custom backwards: split input and weight gradients, activation recomputation, gradients of cached keys and values.

`autograd_engine_call` calls autograd's engine, `deferred_weight_grads` defers weight gradients, `recompute` drops
activations and recomputes them, `saved_tensor_offload` moves them to host memory, `slice_kv_cache` caches keys and
values of slices; `engine_owned_layers` replaces classes of users' layers, and knows which engine holds a weight.
Imports `comm.device` alone.
"""
