"""Messages with frames that identify them, for wires that match any two messages.

`frame` is the frame's layout, `framed` sends and receives with it.
Imports `comm.base`.
"""
