"""What goes over the watch's connections: frames of a kind and a bounded size, after both ends have shown the key.

    ┌ kind 1 B ┐┌ length 4 B ┐┌ payload ─────────────────────────┐
    │ J        ││ 57         ││ {"error": "ValueError: …", …}    │     J: a JSON object, at most 64 KiB
    │ P        ││ 20417      ││ 4 B number, the plan, compressed │     P: at most 64 MiB
    └──────────┘└────────────┘└──────────────────────────────────┘

A length is looked at before anything of that length is read. The key never goes over the wire: each end answers the
other's challenge with an HMAC. Who is not known yet may send one small J frame, nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
import zlib
from collections.abc import Iterator
from typing import Any

JSON, PLAN = b"J", b"P"
MOST_BYTES = {JSON: 64 * 1024, PLAN: 64 * 1024 * 1024}
MOST_OF_STRANGERS = 1024
"""Bytes of a frame from somebody who has not shown the key."""
MOST_PLAN = 1024 * 1024 * 1024
"""Bytes of a plan file, not compressed."""
HEAD = struct.Struct(">cI")
NUMBER = struct.Struct(">I")


class FrameError(Exception):
    """What came is no frame of ours."""


def json_frame(message: dict[str, Any]) -> bytes:
    """Return a message as a frame; raises `FrameError` for one that is too long."""
    return _frame(JSON, json.dumps(message).encode())


def plan_frame(number: int, text: str) -> bytes:
    """Return a plan file and its number as a frame; raises `FrameError` for one that is too long."""
    return _frame(PLAN, NUMBER.pack(number) + zlib.compress(text.encode(), 1))


def _frame(kind: bytes, payload: bytes) -> bytes:
    if len(payload) > MOST_BYTES[kind]:
        raise FrameError(f"a frame of {len(payload)} bytes")
    return HEAD.pack(kind, len(payload)) + payload


class FrameReader:
    """Puts the bytes of one connection together to frames.

    Attributes:
        is_known: whether the other end has shown the key; until then frames are small.
    """

    def __init__(self) -> None:
        self.is_known = False
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield (kind, payload) of each frame that is complete; raises `FrameError` for what is no frame."""
        self._received += data
        while len(self._received) >= HEAD.size:
            kind, length = HEAD.unpack_from(self._received)
            most = MOST_BYTES.get(kind, 0) if self.is_known else MOST_OF_STRANGERS * (kind == JSON)
            if length > most:
                raise FrameError("a frame of an unknown kind, or too long")
            if len(self._received) < HEAD.size + length:
                return
            payload = bytes(self._received[HEAD.size : HEAD.size + length])
            del self._received[: HEAD.size + length]
            yield kind, payload


def message_of(payload: bytes) -> dict[str, Any]:
    """Return the message in a J frame; raises `FrameError` for what is no JSON object."""
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise FrameError("no JSON") from error
    if not isinstance(found, dict):
        raise FrameError("no JSON object")
    return found


def plan_of(payload: bytes) -> tuple[int, bytes]:
    """Return the number and the plan file in a P frame; raises `FrameError` for what holds none."""
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
    """Return something that was never asked before."""
    return secrets.token_hex(16)


def answer(key: str, asked: str, role: str) -> str:
    """Return what only somebody with the key can say to a challenge; the roles of both ends differ."""
    return hmac.new(key.encode(), f"{role}:{asked}".encode(), hashlib.sha256).hexdigest()


def is_answer(given: object, key: str, asked: str, role: str) -> bool:
    """Whether an answer shows that somebody has the key."""
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, answer(key, asked, role))
