"""Weights in the formats of transformers: names, folders of safetensors, and its conversions of checkpoints.

Imports the rest of `saving`, and what is below it.
"""
