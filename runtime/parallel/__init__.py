"""Parallelism inside a stage: groups of the mesh, and the folders `tensor`, `context` and `expert`.

Imports `blocks`, `comm`, `autograd`; knows nothing of plans' instructions, of gradients' buckets or of training.
"""
