"""Proofs that a cut block is equivalent to the whole one: over tp, with sliced tokens, over cp, slice by slice.

`prover` decides which blocks are proved and refuses others; `kinds` groups equal blocks, `twins` makes copies with
random weights, `arrivals` their trial inputs, `trial` runs a copy and compares, `features_apart` tracks features in it,
`later_steps` repeats that for new shapes. Imports `tensor`, `expert`, `context`, `blocks`, `autograd`, `comm`, `job`.
"""
