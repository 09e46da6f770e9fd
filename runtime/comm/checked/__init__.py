"""Messages with frames that identify them, for wires that match any two messages.

`message_frame` is the frame's layout, `framed_messages` sends and receives with it.
Imports `comm.transport_interface`.
"""
