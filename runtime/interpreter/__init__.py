"""Executes a plan: each instruction bound once to its handler, then a loop that walks the list.

`plan_runner` binds plans to a rank and runs them, `step_graphs` from graphs of the device; `interpreter` has the
dispatch table and the loop. `handlers`, and `p2p` for messages, are what it dispatches to; `rank_state` says what each
of them may touch, `cells` where values are between instructions, `host_copies` what goes to the host's memory;
`data_flow` asks the planner what an instruction takes and makes; `recorder` writes down when each ran. Imports `state`,
`stage`, `parallel`, `blocks`, `comm`, `autograd`.
"""
