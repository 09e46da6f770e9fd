"""State of users' blocks besides weights: refused before stages are built where a plan breaks it, then watched.

refused_combinations       one table of plans and kinds of blocks; `repeatable_builders`: blocks as they are built
state_in_several_stages    state of blocks of several stages: by the names that code reads (`names_read_by_code`)
writes_across_stages       the same in steps: by what changes; `weights_not_held`: weights that this rank does not hold
state_changed_by_forwards  state that forwards change in steps; `custom_backwards`: what may change gradients

Imports `parallel`, `user_objects`, `blocks`, `comm` and `settings`.
"""
