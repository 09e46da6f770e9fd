"""The settings of a run, each said once: what an engine takes, and what a job file says beside it.

`run_settings` has those that are arguments of `Engine` too, and the base of all, `job` all sections of a job file and
what reads one, `tensor_rules` what a rule of tensor parallelism says. Imports neither torch nor anything else of the
runtime, so that a job that does not fit is refused at once.
"""
