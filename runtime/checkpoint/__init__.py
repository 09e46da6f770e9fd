"""Checkpoints: what a training run is saved as, and resumed from.

Imports `state`, `comm` and what stands below them.
"""
