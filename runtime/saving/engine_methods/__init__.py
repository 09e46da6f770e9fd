"""Public methods `engine.saves` and `engine.weights`: save, load and change an engine's state and weights.

Imports the rest of `saving`, and what is below it.
"""
