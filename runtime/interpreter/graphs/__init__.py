"""Training steps from graphs of the device; `step_graphs` says how."""
