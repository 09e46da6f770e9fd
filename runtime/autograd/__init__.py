"""Backwards run by hand: halves of a backward, recomputation, gradients of keys and values of earlier slices.

`run_backward` stops at given edges, `deferred_weight_grads` puts weight gradients off, `recompute` drops activations
and brings them back, `offload` moves them to the host's memory, `kv_store` serves sequences in slices. Imports
`comm.device` alone.
"""
