"""How a run starts and ends: from a job file to a plan, one process per rank, and one exit code for all of them.

`local` starts the ranks on this machine (`processes`), each `bound` to it, and `supervise` waits for them; `worker` is
what each of them runs, until its end or a `stop_request`; `to_plan` finds the plan of a job, `exit_together` ends ranks
that all found the same fault. Nothing imports this room; it imports all others.
"""
