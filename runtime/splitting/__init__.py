"""Splitting of whole models, of any library, into pipeline blocks by running or tracing their forward: `split`.

    model ──▶ frame (its forward, no weights) ──▶ flow (data between its layers) ──▶ blocks ──▶ proved ──▶ Split

`weightless_model` is a copy whose forward runs without weights, `flow` the record of such runs (walks),
`split_blocks` the blocks made from it, `structure` finds layers, `adapters` has knowledge of libraries; `traced`
traces a forward symbolically (torch.fx) instead. Imports `examine`, `parallel` and `blocks`.
"""
