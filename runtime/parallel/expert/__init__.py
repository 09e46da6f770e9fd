"""Expert parallelism: the mixture-of-experts layer, its router, its all-to-all over ep, and each expert's load.

Imports `blocks`, `comm`.
"""
