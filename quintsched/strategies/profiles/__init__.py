"""Measured times of operators, blocks or whole steps in one form (`profile`), and steps composed from them.

    Aceso's folder ─ aceso ──────────────┐                      ┌─ stage_times        forward, backward, messages
    a Kineto trace ─ kineto ─────────────┼─▶ Profile ─▶ layout ─┼─ blocking_1f1b      messages that two ranks exchange
    our own trace  ─ profile_from_trace ─┤      ╰ resize_profile├─ stage_peak_memory  peak memory of a stage
    a profile.json ─ read_profile ───────┘        another model └─ compose            the whole step

`operator_layout` assigns operators, and how each is cut, to stages; `operator_rates` looks their times up. Steps that
are measured as a whole, without operators, go to `prediction`, which uses the measured rates in place of the
datasheet's. Imports `descriptions`, `trace` and `files`.
"""
