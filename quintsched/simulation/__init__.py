"""Time and memory of a plan: the event graph run under a cost model, and what ranks hold at their fullest.

`activation_memory` and `state_memory` count what stands on a rank; `measured` reads a trace of a real run in the same
words; `time_grid` lays a simulation on a raster. Imports `ir` and `graph`.
"""
