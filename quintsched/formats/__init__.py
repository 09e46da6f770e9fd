"""Files and foreign formats, each in a module: read strictly, written whole or not at all.

`plan_json` and `plan_columns` are our own (`plan_file` chooses), `promela` is SPIN's input, `networkx_graph` the
dependency graph as an object. The files of collectives and traces are in their own rooms. Imports `passes`, `verify`
and below.
"""
