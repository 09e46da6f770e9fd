"""The proof that a plan is sound, point by point, or the counter-example in words.

`soundness` is the whole proof: well-formed (`wellformed`, and `meaning`: does every route see the model?), complete,
data flow (`liveness`), channels, `deadlock`, `collectives`, memory. `equivalence` judges a plan by algebra instead:
does a `symbolic_run` of it, and of its collectives (`symbolic_collective`), compute the sequential gradient of
`algebra`? Imports `text`, `simulation`, `collectives`, `graph` and `ir`.
"""
