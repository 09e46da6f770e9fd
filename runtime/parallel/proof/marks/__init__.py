"""Marks that are followed beside numbers through calls: of whose features they are made, and of what.

Imports no other files of `proof`.
"""
