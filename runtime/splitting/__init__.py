"""Splitting of whole models, of any library, into pipeline blocks by running or tracing their forward.

    model ──▶ frame (its forward, no weights) ──▶ flow (data between its layers) ──▶ blocks ──▶ proved ──▶ Split

`weightless_model` is a copy whose forward runs without weights, `layer_dataflow` the record of such runs (walks),
`layer_and_segment_blocks` the blocks made from it, `find_layers` finds layers, `adapters` has knowledge of libraries;
`split_by_torch_fx` traces a forward symbolically (torch.fx) instead; `state_between_layers` detects state between
layers that runs change. Imports `parallel`, `user_objects`, `blocks`, `autograd` and `comm`.
"""
