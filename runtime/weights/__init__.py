"""The weights of a training as a whole: averaged, full on any mesh, and read and written between steps.

`average` keeps an exponential moving average, `full_state` gathers full tensors and takes them over, `access` lets
users read and change weights that lie in shards and masters. Imports `state` and what is below it.
"""
