"""Blocks whose backward is not linear in the gradient: `own_backwards` finds suspects, `backwards` tries them.

Imports what `examine` may, and runs of blocks from beside it.
"""
