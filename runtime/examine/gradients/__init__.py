"""Blocks whose backward is not linear in the gradient: `guards.own_backwards` finds them, `nonlinear_backwards` tries.

Imports what `examine` may, and runs of blocks from beside it.
"""
