"""Experiments on users' blocks before they train: losses that they return, their backwards, extras that they take.

`block_examinations` runs them for a rank's stages and fills in `steps.block_findings`, the facts that a run goes by.
Engines alone import this room, and pass it to the interpreter. Imports `steps`, `stage`, `losses`, `guards`,
`parallel`, `objects`, `blocks` and `comm`.
"""
