"""Reads and draws of a block, watched as it runs: weights that it takes itself, and random numbers.

Imports `feature_owners` of `proof`, for the line that runs, and `twins`.
"""
