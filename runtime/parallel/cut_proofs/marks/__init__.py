"""Marks that are propagated with tensor elements through operators: owners (ranks) and labels (value numbers).

Imports no other files of `proof`.
"""
