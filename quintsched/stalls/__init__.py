"""Who is to blame when a run stands still: from a plan, and what each rank said last, to a name or to "unknown".

`states` is what a rank says of itself and what became of its process. Imports `graph`, `ir`, `files` and `errors`;
the runtime's watcher asks it, the command line and the pictures show what it found.
"""
