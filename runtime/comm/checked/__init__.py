"""Messages that say what they are, where a wire would take anything for anything.

`frame` is what stands behind a message, `framed` sends and receives with it.
Imports `comm.base`.
"""
