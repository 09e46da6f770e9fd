"""Expert parallelism: the mixture of experts, its router, its exchange of tokens over ep, and each expert's load.

Imports `blocks`, `comm`.
"""
