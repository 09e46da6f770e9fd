"""The best strategies for a model, a cluster and a batch: a search that can show what it left out, and why.

Imports `prediction` and `descriptions`.
"""
