"""Input data of predictions: models, hardware, and strategies that map one to the other.

`model` is a transformer by its sizes, `hardware` a cluster by its datasheet, `strategy` the mesh and all other choices
of the user; `presets_and_files` finds presets by name and reads files, `huggingface` reads the `config.json` of
transformers, `parameters` counts weights, `strategy_validity` checks that a strategy is valid; `flag_rows` parses all
three from flags, `strategy_text` formats strategies as text. Nothing here has any timing. Imports `schedules`, `ir`,
`files` and `errors`.
"""
