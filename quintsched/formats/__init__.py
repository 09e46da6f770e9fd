"""Files and foreign formats, each in a module: read strictly, written whole or not at all.

`plan_json`, `collective_json` and `trace_json` are our own; `torch_csv` is PyTorch's, `promela` is SPIN's input,
`networkx_graph` the dependency graph as an object. Imports `ir`, `graph`, `collectives`, `verify`.
"""
