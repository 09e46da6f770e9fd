"""Execution of a plan: each instruction is bound once to its handler, then a loop walks the list of calls.

`plan_runner` binds plans to a rank and runs them, `cuda_graphs` by CUDA graphs; `interpreter` has the dispatch table
and the loop. It dispatches to `handlers`, and to `send_and_receive` for messages. `rank_state` has the state that each
handler may touch, `value_cells` the values between instructions, `activation_offload` activations in host memory;
`program_values` asks the planner what an instruction takes and makes; `recorder` traces when each ran. Imports `steps`,
`state`, `stage`, `optim`, `losses`, `agreement`, `parallel`, `objects`, `blocks`, `comm`, `autograd`, `settings`,
`watch`.
"""
