"""The stages of a rank: blocks of the model, wrapped for its mesh, with their forward, microbatches and tied weights.

`rank_stages` sets all of it up once; `build_stages` cuts blocks into stages and builds these, `stage_forward` runs one,
`tensors_sent_between_stages` has the tensors between two. Imports `guards`, `losses`, `agreement`, `parallel`,
`user_objects`, `blocks`, `data`, `autograd`, `comm` and `settings`.
"""
