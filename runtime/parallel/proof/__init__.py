"""Proofs that a block gives the same numbers cut as whole: over tp, with sliced tokens, over cp, slice by slice.

`prover` decides what is proved and refuses; `kinds` says which blocks are alike, `twins` makes copies with random
weights, `arrivals` what blocks are given, `trial` runs a copy and compares, `features_apart` follows features in one,
`later_steps` again where anything is new. Imports `tensor`, `expert`, `context`, `blocks`, `autograd`, `comm`, `job`.
"""
