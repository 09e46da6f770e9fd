"""Execution of a plan: each instruction is bound once to its handler; each step makes the bound calls in a loop.

Read first: `handler_table_and_loop`, `instruction_state`, `handlers`, `send_and_receive` (messages),
`values_between_instructions` (cells); then `bind_and_run_plans`, which binds plans to a rank and runs their steps.
`program_dataflow`: values that instructions take and make. `offload_instructions`, `lend_instructions`: activations
elsewhere. `step_losses`, `join_outputs`: results. `cuda_graphs`: steps from graphs. `errors_with_rank_and_stage`,
`trace_recorder`, `busy_clock`, `saved_activation_bytes`: errors, times, memory. Imports `step_setup`,
`weights_and_gradients`, `stage`, `optim`, `losses`, `agreement`, `parallel`, `user_objects`, `blocks`, `comm`,
`autograd`, `settings`, `watch`.
"""
