"""Verification of a run on a mesh against the same run in one process: the first difference, by block, layer and rank.

`record_steps` records the tensors that a step computes, `compare_with_one_process` compares two runs. Imports
`interpreter`, `saving` and all below.
"""
