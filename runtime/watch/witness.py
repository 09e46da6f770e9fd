"""How a rank's process ended, as who started it tells a hub on another machine: the exit code, or the signal.

launcher of rank 3's machine        hub
  │ ◀──────────── {"ask": challenge} │
  │ {"answer": …, "ended": [3, -9]}▶ │     for the verdict, which is due 0.3 s after the rank hung up
  │ ◀─────────────────────────── …   │
"""

from __future__ import annotations

import socket
from contextlib import suppress

from .connection import CHUNK
from .frames import FrameError, FrameReader, answer, challenge, json_frame, message_of

HUB_S = 2.0
"""How long the hub may take to answer."""


def tell_end(hub: str, rank: int, code: int) -> bool:
    """Tell the hub at "host:port key" how a rank has ended, as `subprocess` has it; return whether it heard."""
    address, _, key = hub.partition(" ")
    host, _, port = address.rpartition(":")
    with (
        suppress(OSError, ValueError, FrameError, KeyError, StopIteration),
        socket.create_connection((host, int(port)), timeout=HUB_S) as connected,
    ):
        reader = FrameReader()
        _, asked = next(reader.feed(connected.recv(CHUNK)))
        given = answer(key, str(message_of(asked)["ask"]), "rank")
        connected.sendall(json_frame({"answer": given, "ask": challenge(), "ended": [rank, code]}))
        return bool(connected.recv(CHUNK))
    return False
