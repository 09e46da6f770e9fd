"""The batch of a replica: cut into microbatches, and compared between the ranks of the replica.

`microbatches` cuts; `compare_whole_batches` compares whole batches in some steps, `same_batch_every_step` a digest of
each in every step. Imports `blocks`, `data`, `parallel` and `comm`.
"""
