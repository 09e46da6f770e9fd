"""Parallelism inside a stage: the groups of a mesh, dropout that no mesh changes, and a folder for each axis.

`proof` (that what is cut stays the same), `tensor` (and sequence), `expert`, `context`: a folder imports only those
named after it. Pipeline and data parallelism are in `stage` and `state`, which are above. Imports `blocks`,
`autograd`, `comm`, `job`; of a plan it knows the mesh and who sends to whom, and nothing of gradient buckets or of
training.
"""
