"""What a run really did, in the words of its plan: the files that ranks leave (`trace_json`), and what they say.

`measured` lays a step of a trace beside its simulation, `measured_costs` works out costs. Imports `formats`,
`simulation` and below.
"""
