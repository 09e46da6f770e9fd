"""Measured times of operators, blocks or whole steps in one form (`profile`), and steps composed from them.

    Aceso's folder  ─ aceso ──┐                            ┌─ stages    times of a stage: forward, backward, messages
    a Kineto trace  ─ kineto ─┼──▶ Profile ──▶ layout ──▶  ┼─ exchange  1F1B whose messages are exchanges of two ranks
    our own trace   ─ traces ─┤       ╰ resize             ├─ memory    peak memory of a stage
    a profile.json  ─ reading ┘         another model's    └─ compose   the whole step

`operator_layout` assigns operators, and how each is cut, to stages; `rates` looks their times up. Steps measured as a
whole, without operators, go to `prediction`, which uses the measured rates in place of the datasheet's. Imports
`descriptions`, `trace` and `files`.
"""
