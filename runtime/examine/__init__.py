"""Experiments on users' blocks before they train: losses that they return, their backwards, extras that they take.

`block_examinations` runs them for a rank's stages and fills in `step_setup.block_examination_results`, the facts that a
run goes by. Engines alone import this room, and pass it to the interpreter. Imports `step_setup`, `stage`, `losses`,
`guards`, `parallel`, `user_objects`, `blocks` and `comm`.
"""
