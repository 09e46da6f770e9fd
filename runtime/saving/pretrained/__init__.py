"""Weights as transformers stores them: names, folders of safetensors, and what its converters do with these.

Imports the rest of `saving`, and what is below it.
"""
