"""Measured times of operators or blocks, in one form, read from several kinds of files.

Imports `descriptions`, `trace` and `files`.
"""
