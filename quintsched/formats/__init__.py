"""File formats and exports of plans, one module each: read strictly, written atomically.

`plan_json` and `plan_columns` are this project's own (`plan_file` chooses), `promela` is the input of the SPIN model
checker, `networkx_graph` the dependency graph as an object. Files of collectives and traces are in their own packages.
Imports `passes`, `verify` and packages below.
"""
