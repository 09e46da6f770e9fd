"""What the code of a block reads besides its inputs: numbers, flags and words, and the weights of layers.

Imports `feature_owners` of `proof`, for the line that runs.
"""
