"""Reads and draws of a block: weights that it takes itself, sizes that are cut, random numbers, what steers its code.

Imports `feature_owners` of `proof`, for the line that runs, with its rules, and `twins`.
"""
