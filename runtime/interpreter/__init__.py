"""Execution of a plan: each instruction is bound once to its handler; each step makes the bound calls in a loop.

Read first `handler_table_and_loop` (words, dispatch table, loop), `program_dataflow` (values that instructions take and
make), `values_between_instructions` (cells that hold them), `instruction_state`, `handlers`, `send_and_receive`; then
`bind_and_run_plans`, which binds plans to a rank and runs their steps. Activations that leave the rank's memory:
`offload_instructions`, `lend_instructions`. Results: `step_losses`, `join_outputs`. Steps from CUDA graphs:
`cuda_graphs`. Errors, times, memory: `errors_with_rank_and_stage`, `trace_recorder`, `busy_clock`,
`saved_activation_bytes`. Imports `step_setup`, `weights_and_gradients`, `stage`, `optim`, `losses`, `guards`,
`agreement`, `parallel`, `user_objects`, `blocks`, `comm`, `autograd`, `settings`, `watch`.
"""
