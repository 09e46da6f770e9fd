"""Verification of a run on a mesh against the same run in one process: the first difference, by block, layer and rank.

`recording` records the tensors that a step computes, `comparison` compares two runs. Imports
`interpreter`, `saving` and all below.
"""
