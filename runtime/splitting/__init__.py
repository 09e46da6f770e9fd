"""Whole models of other people cut into blocks, by the code that they have: `split`.

    model ──▶ frame (its forward, no weights) ──▶ flow (what passes between its layers) ──▶ blocks ──▶ proved ──▶ Split

`weightless_model` is a copy whose forward can be walked without weights, `flow` what such walks find out,
`split_blocks` the blocks that come of it, `structure` where layers are, `adapters` what is known of a library; `traced`
finds the steps of a forward by symbols instead. Imports `examine`, `parallel` and `blocks`.
"""
