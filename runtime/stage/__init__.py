"""A stage: some blocks of the model, wrapped for its mesh, its forward, its microbatches, its tied weights.

Imports `parallel`, `blocks`, `comm` and `autograd`.
"""
