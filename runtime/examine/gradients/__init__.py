"""Blocks whose backward is not linear in the gradient: suspects of `guards.custom_backwards` are tried.

Imports what `examine` may, and runs of blocks from beside it.
"""
