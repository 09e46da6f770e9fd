"""Soundness of cut sequences for all inputs: over cp, in slices, or with tokens sliced over tp.

Imports the files of `proof` that track owners and run twins.
"""
