"""Cuts of a model's layers into stages: the best one for their costs, with the schedule that suits it.

`stage_layout` is the entry point; `layer_costs` has the layers, `cut_timing` times many cuts under one order,
`cut_search` finds the best of them, and `layout_strings` writes layouts of other frameworks.
Imports the files of `solve` and what these import.
"""
