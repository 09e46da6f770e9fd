"""Traces of real runs, by instruction of the plan: files written by ranks (`trace_json`), and their analysis.

`measured_trace` compares a step of a trace with its simulation, `measured_costs` derives costs. Imports `formats`,
`simulation` and packages below.
"""
