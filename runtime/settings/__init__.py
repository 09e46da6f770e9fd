"""Settings of a run, each defined once: arguments of an engine, and the further sections of a job file.

`engine_settings` has those that are arguments of `Engine` too, and the base of all, `allowed_setting_values` the words
that they take, `job_file` all sections of a job file and its reader, `tensor_parallel_rules` the rules of tensor
parallelism. Imports neither torch nor anything else of the runtime, so that a job that does not fit is refused at once.
"""
