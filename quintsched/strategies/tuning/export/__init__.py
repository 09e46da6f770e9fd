"""Export of a strategy: a plan and a job file for our own runtime, or the arguments of another framework.

`frameworks` has what each can run; `megatron_arguments` and `torch_arguments` write arguments. Imports `descriptions`,
`prediction` and the planner.
"""
