"""Reads and draws of a block: direct uses of weights, cut sizes, random numbers.

Imports `taint_features_by_rank` of `proof`, for the current line of user code, with its rules, and `block_twins`.
"""
