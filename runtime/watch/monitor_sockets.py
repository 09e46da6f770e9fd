"""Sockets of the hub: accepts connections, authenticates peers, assembles frames, drops peers that break the rules.

    rank                                hub
      │ ◀──────────── {"ask": challenge} │     a stranger: one frame of at most 1 KiB, within 10 s, or it is dropped
      │ {"answer": …, "ask": …, …} ────▶ │     a rank: larger frames, within the bounds below
      │ ◀──────────────── {"answer": …}  │

Nothing here blocks: messages to a rank that does not read, such as a stopped one, are dropped when its socket is full.

Protocol of the watch's connections: frames of a kind and a bounded size, after mutual authentication by a key.

    ┌ kind 1 B ┐┌ length 4 B ┐┌ payload ─────────────────────────┐
    │ J        ││ 57         ││ {"error": "ValueError: …", …}    │     J: a JSON object, at most 64 KiB
    │ P        ││ 20417      ││ 4 B number, the plan, compressed │     P: at most 64 MiB
    └──────────┘└────────────┘└──────────────────────────────────┘

A length is checked before that many bytes are read. The key is never sent: each end answers the other's challenge with
an HMAC. An unauthenticated peer may send one small J frame, nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from . import torch_free_clock

JSON, PLAN = b"J", b"P"
MOST_FRAME_BYTES = {JSON: 64 * 1024, PLAN: 64 * 1024 * 1024}
MOST_OF_STRANGERS = 1024
"""Maximum size in bytes of a frame from an unauthenticated peer."""
MOST_PLAN = 1024 * 1024 * 1024
"""Maximum size in bytes of a plan file, uncompressed."""
FRAME_HEAD = struct.Struct(">cI")
NUMBER = struct.Struct(">I")


class FrameError(Exception):
    """The received bytes are no valid frame."""


def json_frame(message: dict[str, Any]) -> bytes:
    """Return a message as a frame; raises `FrameError` for one that is too long."""
    return _frame(JSON, json.dumps(message).encode())


def plan_frame(number: int, text: str) -> bytes:
    """Return a plan file and its number as a frame; raises `FrameError` for one that is too long."""
    return _frame(PLAN, NUMBER.pack(number) + zlib.compress(text.encode(), 1))


def _frame(kind: bytes, payload: bytes) -> bytes:
    if len(payload) > MOST_FRAME_BYTES[kind]:
        raise FrameError(f"a frame of {len(payload)} bytes")
    return FRAME_HEAD.pack(kind, len(payload)) + payload


class FrameReader:
    """Assembles the bytes of one connection into frames.

    Attributes:
        is_known: whether the other end is authenticated; until then frames are small.
    """

    def __init__(self) -> None:
        self.is_known = False
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield (kind, payload) of each complete frame; raises `FrameError` for an invalid one."""
        self._received += data
        while len(self._received) >= FRAME_HEAD.size:
            kind, length = FRAME_HEAD.unpack_from(self._received)
            most = MOST_FRAME_BYTES.get(kind, 0) if self.is_known else MOST_OF_STRANGERS * (kind == JSON)
            if length > most:
                raise FrameError("a frame of an unknown kind, or too long")
            if len(self._received) < FRAME_HEAD.size + length:
                return
            payload = bytes(self._received[FRAME_HEAD.size : FRAME_HEAD.size + length])
            del self._received[: FRAME_HEAD.size + length]
            yield kind, payload


def message_of(payload: bytes) -> dict[str, Any]:
    """Return the message in a J frame; raises `FrameError` for a payload that is no JSON object."""
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise FrameError("no JSON") from error
    if not isinstance(found, dict):
        raise FrameError("no JSON object")
    return found


def plan_of(payload: bytes) -> tuple[int, bytes]:
    """Return the number and the plan file in a P frame; raises `FrameError` for an invalid payload."""
    if len(payload) < NUMBER.size:
        raise FrameError("no plan")
    expander = zlib.decompressobj()
    try:
        text = expander.decompress(payload[NUMBER.size :], MOST_PLAN)
    except zlib.error as error:
        raise FrameError("no plan") from error
    if not expander.eof:
        raise FrameError("a plan that is cut off, or too long")
    return NUMBER.unpack_from(payload)[0], text


def challenge() -> str:
    """Return a random challenge."""
    return secrets.token_hex(16)


def answer(key: str, asked: str, role: str) -> str:
    """Return the HMAC that answers a challenge; `role` differs between both ends, so that none can be reflected."""
    return hmac.new(key.encode(), f"{role}:{asked}".encode(), hashlib.sha256).hexdigest()


def is_answer(given: object, key: str, asked: str, role: str) -> bool:
    """Whether an answer proves knowledge of the key."""
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, answer(key, asked, role))


ADDRESS, KEY = "QUINTSCHED_WATCH", "QUINTSCHED_WATCH_KEY"
"""Environment variables by which ranks find their hub."""
CHUNK = 256 * 1024
STRANGER_S = 10.0
CUT_S = 10
"""Seconds without a reply of the other host's system after which a connection is cut."""


def keep_alive(connected: socket.socket) -> None:
    """Enable keep-alive, so that the system detects an unreachable host even on an idle connection."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": CUT_S // 2}.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, CUT_S * 1000)


class Connection:
    """One connection to a rank, or to an unauthenticated peer.

    Attributes:
        rank: the peer's rank; None: not known yet.
        is_closed: whether it has ended.
        is_cut: whether the network ended it, not the other process.
    """

    def __init__(self, connected: socket.socket, key: str) -> None:
        connected.setblocking(False)
        with suppress(OSError):
            keep_alive(connected)
        self.socket = connected
        self.rank: int | None = None
        self.is_closed = self.is_cut = False
        self.since_s = torch_free_clock.now_s()
        self._key, self._asked = key, challenge()
        self._reader = FrameReader()
        self.send({"ask": self._asked})

    def send(self, message: dict[str, Any]) -> None:
        """Send a message without blocking; bytes that do not fit into the socket are dropped."""
        with suppress(OSError):
            self.socket.send(json_frame(message))

    def receive(self) -> Iterator[dict[str, Any]]:
        """Yield the received messages; an invalid one ends the connection."""
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
        """Close the connection."""
        self.is_closed = True
        self.socket.close()


class Listener:
    """The hub's listening socket and all its connections; `most` is their maximum number."""

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
        """Wake the thread in `wait_connections`."""
        with suppress(OSError):
            os.write(self._wake, b"!")

    def wait_connections(self, timeout_s: float) -> Iterator[Connection]:
        """Wait up to a timeout, and yield connections that have received data, or have ended."""
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
            if connection.rank is None and torch_free_clock.now_s() > connection.since_s + STRANGER_S:
                self.drop(connection)

    def drop(self, connection: Connection) -> None:
        """Close a connection."""
        if self._connections.pop(connection.socket, None) is not None:
            self._selector.unregister(connection.socket)
        connection.close()

    def close(self) -> None:
        """Close all connections."""
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
