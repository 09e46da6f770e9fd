"""Search for the best strategies for a model, a cluster and a batch, with a certificate of all that it left out.

Imports `prediction` and `descriptions`.
"""
