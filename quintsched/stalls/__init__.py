"""Diagnosis of stalled runs: from a plan and the last state that each rank reported, to a culprit rank or "unknown".

`last_reported_rank_states` are the reports of ranks and the fates of their processes, `culprit` finds the culprit
along the plan's waits (`wait_graph`, `partner_instructions`), `stall_report` is the result as a file, and
`verdict_text` as text. Imports `formats`, `simulation`, `graph`, `ir`, `files` and `errors`; used by the runtime's
watcher, the command line and the pictures.
"""
