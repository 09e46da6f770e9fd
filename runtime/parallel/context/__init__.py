"""Context parallelism: attention over a sequence of which each rank of cp holds shards (ring, gather, ulysses).

Imports `blocks`, `comm`, `job`.
"""
