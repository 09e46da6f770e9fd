"""Execution of a plan: each instruction is bound once to its handler, then a loop walks the list of calls.

`bind_and_run_plans` binds plans to a rank and runs them, `cuda_graphs` by CUDA graphs; `instruction_loop` has the
dispatch table and the loop. It dispatches to `handlers`, to `send_and_receive` for messages, `lend_instructions` for
those of lent activations; `offload_instructions` has activations in host memory. `instruction_state` has the state that
each handler may touch, `values_between_instructions` what lies between two. `program_dataflow` asks the planner what
each takes and makes; `trace_recorder` times it. `step_losses` has losses, `join_outputs` joins outputs,
`errors_with_rank_and_stage` locates errors of user code. Imports `step_setup`, `weights_and_gradients`, `stage`,
`optim`, `losses`, `agreement`, `parallel`, `user_objects`, `blocks`, `comm`, `autograd`, `settings`, `watch`.
"""
