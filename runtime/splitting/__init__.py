"""Splitting of whole models, of any library, into pipeline blocks by running or tracing their forward: `split_model`.

    model ──▶ frame (its forward, no weights) ──▶ flow (data between its layers) ──▶ blocks ──▶ proved ──▶ Split

`weightless_model` is a copy whose forward runs without weights, `walk_log` the record of such runs (walks),
`split_blocks` the blocks made from it, `find_layers` finds layers, `adapters` has knowledge of libraries;
`split_traced` traces a forward symbolically (torch.fx) instead; `steady_state` detects state between layers that runs
change. Imports `parallel`, `objects`, `blocks`, `autograd` and `comm`.
"""
