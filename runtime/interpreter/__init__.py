"""Execution of a plan: each instruction is bound once to its handler, then a loop walks the list of calls.

`plan_runner` binds plans to a rank and runs them, `step_graphs` by CUDA graphs; `interpreter` has the dispatch table
and the loop. It dispatches to `handlers`, and to `p2p` for messages. `rank_state` has the state that each handler may
touch, `value_cells` the values between instructions, `host_copies` activations offloaded to host memory; `data_flow`
asks the planner for the inputs and outputs of an instruction; `recorder` traces when each ran. Imports `steps`,
`state`, `stage`, `optim`, `examine`, `agreement`, `parallel`, `objects`, `blocks`, `comm`, `autograd`, `settings`,
`watch`.
"""
