"""Messages that are checked on arrival, for wires that match any two messages.

`message_frame` is the layout of the frame that identifies a message, `framed_messages` sends and receives with it;
`gloo_small_reduces` are sums of a few numbers, whose length is checked. Imports `comm.transport_interface`.
"""
