"""A run on a mesh beside the same run in one process: what differs first, by block, layer and rank.

`recording` writes down what a step makes, `comparison` holds two runs against each other. Imports
`interpreter`, `saving` and all below.
"""
