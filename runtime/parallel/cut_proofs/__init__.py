"""Proofs that a cut block is equivalent to the whole one: over tp, with sliced tokens, over cp, slice by slice.

`prove_cuts_in_first_step` decides which blocks are proved and refuses others; `block_kinds` groups equal blocks,
`block_twins` makes copies with random weights, `trial_inputs` their inputs, `twin_runs` runs a copy and compares,
`prove_features_independent` tracks features in it, `proofs_in_later_steps` repeats that for new shapes. Imports
`tensor`, `expert`, `context`, `blocks`, `autograd`, `comm`, `settings`.
"""
