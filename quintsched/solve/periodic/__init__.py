"""Orders that repeat, for steps of many microbatches: placed in a short period, and then annealed around their circles.

`periodic_orders` looks for placements of one microbatch with `periodic_placing`; `pattern_annealing` makes the period
of `periodic_patterns`, of one microbatch or of several, shorter. Imports the files of `solve` and what these import.
"""
