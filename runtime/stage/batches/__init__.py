"""What a replica is given for a step: cut into microbatches, and compared between the ranks of the replica.

`microbatches` cuts; `same_data` compares whole batches now and then, `data_marks` a digest of each in every step.
Imports `blocks`, `data`, `parallel` and `comm`.
"""
