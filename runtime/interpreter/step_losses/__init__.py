"""Losses and metrics of steps: agreed on by ranks, collected from microbatches, summed over ranks.

Imports `losses`, and the other files of `interpreter` below them.
"""
