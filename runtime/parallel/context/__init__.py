"""Context parallelism: attention over a sequence of which each rank of cp holds a slice (ring, gather, ulysses).

Imports `blocks`, `comm`, `job`.
"""
