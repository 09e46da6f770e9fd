"""Messages and collectives that say what they are, where a wire would take anything for anything.

`frame` is what stands behind a message, `framed` sends and receives with it, `collectives` compares before one begins.
Imports `comm.base`.
"""
