"""Start and end of a run: from a job file to a plan, one process per rank, and one exit code for all of them.

`run_arguments` holds the arguments of a run. `local_run` starts `start_and_stop_rank_processes` on this machine, and
`supervise` waits for them; `worker` is the main of a rank, until its end or a stop request (`stop_signals`); `job_plan`
finds the plan of a job. Nothing imports this room; it imports all others.
"""
