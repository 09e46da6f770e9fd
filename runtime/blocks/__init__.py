"""A model as a list of blocks: how blocks are built and called, what they cost, which shapes pass between them.

Imports `comm` and `autograd` at most.
"""
