"""Blocks whose backward is not linear in the gradient: `own_backwards` finds them, `nonlinear_backwards` tries them.

Imports what `examine` may, and runs of blocks from beside it.
"""
