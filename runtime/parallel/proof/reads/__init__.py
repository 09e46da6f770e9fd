"""Reads and draws of a block: weights that it takes itself, random numbers, and what steers its code.

Imports `feature_owners` of `proof`, for the line that runs, and `twins`.
"""
