"""Executes a plan: each instruction bound once to its handler, then a loop that walks the list.

`compute`, `p2p`, `zero` and `step_end` are the handlers; `rank_state` is what they may touch; `recorder` writes down
when each ran. Imports `state`, `stage`, `parallel`, `comm`, `autograd`.
"""
