"""The batch of a replica: cut into microbatches, and compared between the ranks of the replica.

`microbatches` cuts; `full_batch_comparison` compares whole batches in some steps, `batch_digests` a digest of each in
every step. Imports `blocks`, `data`, `parallel` and `comm`.
"""
