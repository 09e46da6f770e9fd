"""Sending and receiving with frames, on wires that take any bytes for any others.

    send    tensor ──copied──▶ staging: payload, frame ──▶ wire            staging is used again when it has been sent
    receive wire ──▶ room: payload, frame, slack ──▶ the frame is looked at when the message is waited for

A receiver that has room behind its buffer gets the payload in place; for any other it is copied out of a room of ours.
Slack lets a message come in that is too long: the wire would end the process for it. Memory that nothing is written to
costs none.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..base import Transport, Work
from .frame import FRAME_BYTES, OWN_BYTES, WIPED, Frame, Label, Stamp, find_frame, head_of, mismatch, own_part

MOST_SLACK = 2**24
MOST_KINDS = 64
"""So many kinds of tensors have staging memory that is kept."""

Key = tuple[torch.dtype, torch.Size]


def room_for(nbytes: int) -> int:
    """Return how many bytes a receiver needs behind a payload."""
    return FRAME_BYTES + min(max(nbytes, 4096), MOST_SLACK)


Post = Callable[[Tensor, Key, int, int], Work]
"""What gives bytes to a wire, or posts memory for them: memory, what it holds, peer, tag."""


class _Staging:
    """Memory that a message is sent from."""

    __slots__ = ("bytes", "memory", "nbytes", "payload")

    def __init__(self, tensor: Tensor) -> None:
        self.nbytes = tensor.nbytes
        self.memory = torch.empty(self.nbytes + FRAME_BYTES, dtype=torch.uint8)
        self.payload = self.memory[: self.nbytes].view(tensor.dtype).view(tensor.shape)
        self.bytes = self.memory.numpy().data


class _SentWork:
    """A message under way, whose staging memory is free when it has arrived."""

    __slots__ = ("_free", "_staging", "_work")

    def __init__(self, work: Work, staging: _Staging, free: list[_Staging]) -> None:
        self._work: Work | None = work
        self._staging, self._free = staging, free

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._free.append(self._staging)


class FramedMessages(Transport):
    """The messages of a transport whose wire takes any bytes for any others: all of them have frames."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._free: dict[Key, list[_Staging]] = {}

    @abstractmethod
    def _post_send(self, memory: Tensor, key: Key, peer: int, tag: int) -> Work:
        """Give bytes to the wire; `key` says what tensor they are."""

    @abstractmethod
    def _post_receive(self, memory: Tensor, key: Key, peer: int, tag: int) -> Work:
        """Let the wire fill memory, which may be longer than what comes."""

    def room_for(self, nbytes: int) -> int:
        """Return how many bytes a message's frame needs, and one that is too long."""
        return room_for(nbytes)

    def _send(self, tensor: Tensor, peer: int, tag: int, label: Label) -> Work:
        return self._sender(peer, tag, label)(tensor)

    def _recv(self, buffer: Tensor, peer: int, tag: int, label: Label) -> Work:
        return self._receiver(buffer, peer, tag, label, None)()

    def _receiver(self, buffer: Tensor, peer: int, tag: int, label: Label, room: Tensor | None) -> Callable[[], Work]:
        rank, post, stamp = self.rank, self._post_receive, self.stamp
        self.publisher.note_room(buffer.nbytes + room_for(buffer.nbytes) if room is None else room.nbytes)
        return FramedReceive(rank, post, stamp, buffer, room, peer, tag, label, verify=self.checks_everything).post

    def _sender(self, peer: int, tag: int, label: Label) -> Callable[[Tensor], Work]:
        unchecked, heads = own_part(label.instruction, None), dict[Key, bytes]()
        post, stamp, stagings = self._post_send, self.stamp, self._free

        def send(tensor: Tensor) -> Work:
            key = tensor.dtype, tensor.shape
            head = heads.get(key)
            if head is None:
                head = heads[key] = self._head_of_new_kind(heads, label, tensor, peer)
            free = stagings.get(key)
            if free is None:
                free = self._new_kind(key)
            staging = free.pop() if free else _Staging(tensor)
            staging.payload.copy_(tensor.detach())
            nbytes = staging.nbytes
            own = unchecked
            if self.checks_everything:
                own = own_part(label.instruction, zlib.crc32(staging.bytes[:nbytes]))
            staging.bytes[nbytes:] = own + head + stamp.bytes
            return _SentWork(post(staging.memory, key, peer, tag), staging, free)

        return send

    def _head_of_new_kind(self, heads: dict[Key, bytes], label: Label, tensor: Tensor, peer: int) -> bytes:
        """Return what both ends know of a message; of one that is longer than all before it the watch is told."""
        if heads and tensor.nbytes > max(shape.numel() * dtype.itemsize for dtype, shape in heads):
            self.publisher.note_longer(tensor.nbytes + FRAME_BYTES, label.instruction)
        if len(heads) >= MOST_KINDS:
            heads.clear()
        return head_of(label, tensor.dtype, tensor.shape, self.rank, peer)

    def _new_kind(self, key: Key) -> list[_Staging]:
        if len(self._free) >= MOST_KINDS:
            del self._free[next(iter(self._free))]
        return self._free.setdefault(key, [])


class _ReceivedWork:
    """A message that is to come into a room, and is looked at when it has."""

    __slots__ = ("_expected", "_receive", "_work")

    def __init__(self, work: Work, receive: FramedReceive, expected: bytes) -> None:
        self._work: Work | None = work
        self._receive, self._expected = receive, expected

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._receive.arrived(self._expected)


class FramedReceive:
    """A place where messages of one kind come in, one after the other.

    Args:
        rank: mine.
        post: posts a receive.
        stamp: the step that this rank is in.
        buffer: where the payload is wanted.
        room: memory that begins with the buffer and goes on for `room_for` its bytes; None: the payload is copied.
        peer, tag, label: of the messages.
        verify: whether they have a checksum.
    """

    def __init__(
        self,
        rank: int,
        post: Post,
        stamp: Stamp,
        buffer: Tensor,
        room: Tensor | None,
        peer: int,
        tag: int,
        label: Label,
        *,
        verify: bool,
    ) -> None:
        self._rank, self._post, self._stamp, self._buffer = rank, post, stamp, buffer
        self._peer, self._tag, self._label, self._verify = peer, tag, label, verify
        self._nbytes, self._key = buffer.nbytes, (buffer.dtype, buffer.shape)
        self._copies = room is None
        self._room = torch.zeros(self._nbytes + room_for(self._nbytes), dtype=torch.uint8) if room is None else room
        self._bytes = self._room.numpy().data
        self._begin, self._end = self._nbytes + OWN_BYTES, self._nbytes + FRAME_BYTES
        self._head = head_of(label, buffer.dtype, buffer.shape, peer, rank)

    def post(self) -> Work:
        """Post the receive of the next message."""
        self._bytes[self._end - len(WIPED) : self._end] = WIPED
        work = self._post(self._room, self._key, self._peer, self._tag)
        return _ReceivedWork(work, self, self._head + self._stamp.bytes)

    def arrived(self, expected: bytes) -> None:
        """Look at the message that has come; raises `MisfitError` unless it is what was expected."""
        if self._bytes[self._begin : self._end] != expected or (self._verify and not self._is_whole()):
            self._refuse(expected)
        if self._copies:
            payload = self._room[: self._nbytes].view(self._buffer.dtype).view(self._buffer.shape)
            with torch.no_grad():
                self._buffer.copy_(payload)

    def _is_whole(self) -> bool:
        frame = Frame.read(bytes(self._bytes[self._nbytes : self._end]))
        return frame is not None and frame.checksum == zlib.crc32(self._bytes[: self._nbytes])

    def _refuse(self, expected: bytes) -> None:
        wanted = Frame.read(own_part(self._label.instruction, None) + expected)
        assert wanted is not None
        came = find_frame(bytes(self._bytes), self._nbytes, expected[-len(self._stamp.bytes) :])
        raise mismatch(wanted, came, self._rank, self._peer)
