"""Backwards run by hand: halves of a backward, recomputation, gradients of keys and values of earlier slices.

Imports torch and nothing else of the runtime.
"""
