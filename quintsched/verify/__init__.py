"""The proof that a plan is sound, point by point, or the counter-example in words.

`soundness` is the whole proof: well-formed, complete, data flow (`liveness`), channels and deadlock, `collectives`,
memory. `equivalence` judges a plan by algebra instead: does it compute the sequential gradient? `sweep` proves a
schedule over many shapes. Imports `ir`, `graph`, `collectives`, `simulation` and `text`.
"""
