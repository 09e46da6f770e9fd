"""Parallelism inside a stage: process groups of the mesh, mesh-independent dropout, and one folder per mesh axis.

`cut_proofs` (that a cut block computes the same), `tensor` (and sequence), `expert`, `context`: a folder imports only
those listed after it. Pipeline and data parallelism are in `stage` and `weights_and_gradients`, which are layers above.
Imports `blocks`, `autograd`, `comm`, `settings`; of a plan it uses the mesh and the peers of messages, and nothing of
gradient buckets or training.
"""
