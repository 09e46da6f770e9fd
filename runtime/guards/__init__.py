"""State of users' blocks besides weights: refused before stages are built where a plan breaks it, then watched.

refused_combinations   one table of plans and kinds of blocks; `built_alike`: blocks as they are built
shared_state           state of blocks of several stages: by the names that code reads (`code_reads`), and in steps
weights_not_held       weights that code reads, but that this rank does not hold
microbatch_state       state that forwards change in steps; `own_backwards`: code and hooks that may change gradients

Imports `parallel`, `objects`, `blocks`, `comm` and `settings`.
"""
