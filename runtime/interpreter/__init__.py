"""Executes a plan: each instruction bound once to its handler, then a loop that walks the list.

`plan_runner` binds plans to a rank and runs them; `interpreter` has the dispatch table and the loop. `compute`,
`p2p`, `zero` and `step_end` are the handlers; `rank_state` says what each of them may touch, `cells` where values are
between instructions, `host_copies` what goes to the host's memory; `data_flow` asks the planner what an instruction
takes and makes; `recorder` writes down when each ran. Imports `state`, `stage`, `parallel`, `blocks`, `comm`,
`autograd`.
"""
