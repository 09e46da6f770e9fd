"""Who is to blame when a run stands still: from a plan, and what each rank said last, to a name or to "unknown".

`states` is what a rank says of itself and what became of its process, `verdict` finds the culprit along the plan's
waits (`wait_graph`, `partners`), `report` is what it found, as a file and in `words`. Imports `formats`, `simulation`,
`graph`, `ir`, `files` and `errors`; the runtime's watcher asks it, the command line and the pictures show its reports.
"""
