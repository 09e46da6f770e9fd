"""Measured times of operators, blocks or whole steps, in one form (`profile`), and steps composed from them.

    Aceso's folder  ─ aceso ──┐                            ┌─ stages    what a stage takes: forward, backward, messages
    a Kineto trace  ─ kineto ─┼──▶ Profile ──▶ layout ──▶  ┼─ exchange  1F1B whose messages are exchanges of two ranks
    our own trace   ─ traces ─┤       ╰ resize             ├─ memory    the fullest moment of a stage
    a profile.json  ─ reading ┘         another model's    └─ compose   all together

`layout` says which operators stand on which stage, cut how; `rates` looks their times up. Steps measured as a whole,
without operators, are handed to `prediction`, which takes the measured rates in place of the datasheet's. Imports
`descriptions`, `trace` and `files`.
"""
