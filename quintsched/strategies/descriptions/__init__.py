"""What is trained and on what, as data: models, hardware, and strategies, the ways to lay one over the other.

`model` is a transformer by its sizes, `hardware` a cluster by its datasheet, `strategy` the mesh and all else that a
user chooses; `library` finds presets by name and reads files, `huggingface` the `config.json` of transformers,
`parameters` counts weights, `placement` says what cannot be placed; `rows` reads all three from flags, `wording` writes
strategies for people. Nothing here knows how long anything takes. Imports `schedules`, `ir`, `files` and `errors`.
"""
