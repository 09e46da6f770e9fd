"""Context parallelism: attention over sequences that are sharded over the ranks of cp (ring, gather, ulysses).

Imports `blocks`, `comm`, `settings`.
"""
