"""The hub's sockets: takes connections, asks for the key, puts frames together, drops who does not keep to the rules.

    rank                                hub
      │ ◀──────────── {"ask": challenge} │     a stranger: one frame of at most 1 KiB, within 10 s, or it is dropped
      │ {"answer": …, "ask": …, …} ────▶ │     a rank: frames as `frames` bounds them
      │ ◀──────────────── {"answer": …}  │

Nothing here blocks: a rank that does not read, as one that is stopped, misses what does not fit into the socket.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from . import wall_time
from .frames import JSON, FrameError, FrameReader, answer, challenge, is_answer, json_frame, message_of, plan_of

ADDRESS, KEY = "QUINTSCHED_WATCH", "QUINTSCHED_WATCH_KEY"
"""The environment that ranks find their hub by."""
CHUNK = 256 * 1024
STRANGER_S = 10.0
CUT_S = 10
"""After so many seconds without a sign of life from the other host's system, a connection is cut."""


def keep_alive(connected: socket.socket) -> None:
    """Let the system find out when the other host is cut off, though nobody says anything."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": CUT_S // 2}.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, CUT_S * 1000)


class Connection:
    """One connection to a rank, or to a stranger.

    Attributes:
        rank: whose it is; None: nobody's yet.
        is_closed: whether it has ended.
        is_cut: whether the network ended it, and not the other process.
    """

    def __init__(self, connected: socket.socket, key: str) -> None:
        connected.setblocking(False)
        with suppress(OSError):
            keep_alive(connected)
        self.socket = connected
        self.rank: int | None = None
        self.is_closed = self.is_cut = False
        self.since_s = wall_time.now_s()
        self._key, self._asked = key, challenge()
        self._reader = FrameReader()
        self.send({"ask": self._asked})

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, as far as the other end takes it."""
        with suppress(OSError):
            self.socket.send(json_frame(message))

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield what has come; what breaks the rules ends the connection."""
        try:
            yield from self._receive()
        except FrameError:
            self.is_closed = True

    def _receive(self) -> Iterator[dict[str, Any]]:
        try:
            data = self.socket.recv(CHUNK)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        except OSError:
            data, self.is_cut = b"", True
        if not data:
            self.is_closed = True
        for kind, payload in self._reader.feed(data):
            if kind != JSON:
                number, text = plan_of(payload)
                yield {"plan": number, "text": text}
                continue
            message = message_of(payload)
            if not self._reader.is_known:
                if not is_answer(message.get("answer"), self._key, self._asked, "rank"):
                    raise FrameError("a stranger")
                self._reader.is_known = True
                self.send({"answer": answer(self._key, str(message.get("ask")), "hub")})
            yield message

    def close(self) -> None:
        """Hang up."""
        self.is_closed = True
        self.socket.close()


class Listener:
    """The hub's end of all connections; `most` is how many there may be at a time."""

    def __init__(self, key: str, listening: socket.socket, most: int) -> None:
        self._key, self._most = key, most
        listening.setblocking(False)
        self._listening = listening
        host, port = listening.getsockname()[:2]
        self.address = f"{host}:{port}"
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._connections: dict[socket.socket, Connection] = {}

    def wake(self) -> None:
        """Let who waits in another thread look around."""
        with suppress(OSError):
            os.write(self._wake, b"!")

    def wait(self, timeout_s: float) -> Iterator[Connection]:
        """Wait at most so long, and yield connections of which something has come, or that have ended."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listening:
                self._accept()
            elif key.fileobj == self._woken:
                with suppress(OSError):
                    os.read(self._woken, 4096)
            elif key.fileobj in self._connections:
                connection = self._connections[key.fileobj]
                yield connection
                if connection.is_closed:
                    self.drop(connection)
        for connection in list(self._connections.values()):
            if connection.rank is None and wall_time.now_s() > connection.since_s + STRANGER_S:
                self.drop(connection)

    def drop(self, connection: Connection) -> None:
        """Hang up."""
        if self._connections.pop(connection.socket, None) is not None:
            self._selector.unregister(connection.socket)
        connection.close()

    def close(self) -> None:
        """Hang up everywhere."""
        for connection in list(self._connections.values()):
            self.drop(connection)
        self._selector.close()
        self._listening.close()
        os.close(self._woken)
        os.close(self._wake)

    def _accept(self) -> None:
        with suppress(OSError):
            connected, _ = self._listening.accept()
            if len(self._connections) >= self._most:
                connected.close()
                return
            connection = Connection(connected, self._key)
            self._connections[connected] = connection
            self._selector.register(connected, selectors.EVENT_READ)
