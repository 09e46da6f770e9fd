"""Send and receive with frames, over wires that match any two messages.

    send    tensor ──copied──▶ staging: payload, frame ──▶ wire            staging is reused after the send is complete
    receive wire ──▶ room: payload, frame, slack ──▶ the frame is checked when the message is waited for

    in place  tensor ──▶ wire ──▶ buffer, frame ──▶ wire ──▶ checked       two messages, and no copy of the payload

An in-place message must not be too long for its buffer, so the first one of a kind on a channel sends its frame first.

A receiver with room behind its buffer gets the payload in place; otherwise it is copied from memory of this module.
Slack accepts a message that is too long, for which the wire would end the process. Slack that is never written to takes
no physical memory.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..transport_interface import Transport, Work
from .message_frame import (
    FRAME_BYTES,
    NO_LABEL,
    OWN_BYTES,
    WIPED,
    Frame,
    Label,
    Stamp,
    find_frame,
    head_of,
    mismatch,
    own_part,
)

MOST_SLACK = 2**24
MOST_KINDS = 64
"""Number of kinds of tensors whose staging memory is kept."""
COPIED = 2**20
"""Size in bytes up to which a copy of a tensor costs less than a separate message for the frame."""

FrameKey = tuple[torch.dtype, torch.Size]


def room_for(nbytes: int) -> int:
    """Return the bytes that a receiver needs behind a payload."""
    return FRAME_BYTES + min(max(nbytes, 4096), MOST_SLACK)


Post = Callable[[Tensor, FrameKey, int, int], Work]
"""Posts a send or a receive on the wire: (memory, its dtype and shape, peer, tag) → Work."""


class _Staging:
    """Memory that a message is copied to for its send."""

    __slots__ = ("bytes", "memory", "nbytes", "payload")

    def __init__(self, tensor: Tensor) -> None:
        self.nbytes = tensor.nbytes
        self.memory = torch.empty(self.nbytes + FRAME_BYTES, dtype=torch.uint8)
        self.payload = self.memory[: self.nbytes].view(tensor.dtype).view(tensor.shape)
        self.bytes = self.memory.numpy().data


class _SentWork:
    """A pending send, whose staging memory is reused after it."""

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
    """Transport whose wire matches any two messages, so that all of them have frames."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._free: dict[FrameKey, list[_Staging]] = {}
        self._gone: set[tuple[tuple[int, int], FrameKey]] = set()
        self.frame_rooms: list[Tensor] = []  # kept between receives in place: new memory would be cleared for each

    @abstractmethod
    def _post_send(self, memory: Tensor, key: FrameKey, peer: int, tag: int) -> Work:
        """Post a send of bytes; `key` is the tensor's dtype and shape, for errors."""

    @abstractmethod
    def _post_receive(self, memory: Tensor, key: FrameKey, peer: int, tag: int) -> Work:
        """Post a receive into memory, which may be longer than the message."""

    def room_for(self, nbytes: int) -> int:
        """Return the bytes behind a buffer for a frame, and for a message that is too long."""
        return room_for(nbytes)

    def send_in_place(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Send a tensor without a copy, its frame as a separate message; a small one as `send` does."""
        if tensor.nbytes <= COPIED:
            return self.send(tensor, peer, tag)
        self._require_ready(tensor, (self.rank, peer))
        key, payload = (tensor.dtype, tensor.shape), _bytes_of(tensor)
        checksum = zlib.crc32(payload.numpy().data) if self.checks_everything else None
        own = own_part(NO_LABEL.instruction, checksum) + head_of(NO_LABEL, *key, self.rank, peer) + self.stamp.bytes
        frame = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        parts = (frame, payload) if self._is_first((self.rank, peer), key) else (payload, frame)
        return _Both(*(self._post_send(part, key, peer, tag) for part in parts))

    def recv_in_place(self, buffer: Tensor, peer: int, tag: int) -> Work:
        """Receive a message of `send_in_place`."""
        if buffer.nbytes <= COPIED:
            return self.recv(buffer, peer, tag)
        self._require_ready(buffer, (peer, self.rank))
        is_first = self._is_first((peer, self.rank), (buffer.dtype, buffer.shape))
        return _InPlaceReceive(self, buffer, peer, tag, is_first=is_first)

    def _is_first(self, channel: tuple[int, int], key: FrameKey) -> bool:
        """Whether no tensor of this kind has been sent in place on this channel."""
        is_first = (channel, key) not in self._gone
        self._gone.add((channel, key))
        return is_first

    def _send(self, tensor: Tensor, peer: int, tag: int, label: Label) -> Work:
        return self._sender(peer, tag, label)(tensor)

    def _recv(self, buffer: Tensor, peer: int, tag: int, label: Label) -> Work:
        return self._receiver(buffer, peer, tag, label, None)()

    def _receiver(self, buffer: Tensor, peer: int, tag: int, label: Label, room: Tensor | None) -> Callable[[], Work]:
        rank, post, stamp = self.rank, self._post_receive, self.stamp
        self.publisher.note_room(buffer.nbytes + room_for(buffer.nbytes) if room is None else room.nbytes)
        return FramedReceive(rank, post, stamp, buffer, room, peer, tag, label, verify=self.checks_everything).post

    def _sender(self, peer: int, tag: int, label: Label) -> Callable[[Tensor], Work]:
        unchecked, heads = own_part(label.instruction, None), dict[FrameKey, bytes]()
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

    def _head_of_new_kind(self, heads: dict[FrameKey, bytes], label: Label, tensor: Tensor, peer: int) -> bytes:
        """Return the part of a frame that both ends know; a message longer than all before goes to the watch."""
        if heads and tensor.nbytes > max(shape.numel() * dtype.itemsize for dtype, shape in heads):
            self.publisher.note_longer(tensor.nbytes + FRAME_BYTES, label.instruction)
        if len(heads) >= MOST_KINDS:
            heads.clear()
        return head_of(label, tensor.dtype, tensor.shape, self.rank, peer)

    def _new_kind(self, key: FrameKey) -> list[_Staging]:
        if len(self._free) >= MOST_KINDS:
            del self._free[next(iter(self._free))]
        return self._free.setdefault(key, [])


class _Both:
    """Two pending messages, one after the other."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Work, second: Work) -> None:
        self._first, self._second = first, second

    def wait(self) -> None:
        self._first.wait()
        self._second.wait()


class _ReceivedWork:
    """A pending receive, whose frame is checked on arrival."""

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
    """A receive that is posted repeatedly for messages of one kind.

    Args:
        rank: this rank.
        post: posts a receive.
        stamp: the step of this rank.
        buffer: destination of the payload.
        room: memory that begins with the buffer, followed by `room_for` its bytes; None: the payload is copied.
        peer, tag, label: those of the messages.
        verify: whether messages have a checksum.
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
        """Check the frame of the received message; raises `MisfitError` unless it is the expected one."""
        if self._bytes[self._begin : self._end] != expected or (self._verify and not self._is_whole()):
            self._refuse(expected)
        if self._copies:
            payload = self._room[: self._nbytes].view(self._buffer.dtype).view(self._buffer.shape)
            with torch.no_grad():
                self._buffer.copy_(payload)

    def _is_whole(self) -> bool:
        frame = Frame.from_bytes(bytes(self._bytes[self._nbytes : self._end]))
        return frame is not None and frame.checksum == zlib.crc32(self._bytes[: self._nbytes])

    def _refuse(self, expected: bytes) -> NoReturn:
        wanted = Frame.from_bytes(own_part(self._label.instruction, None) + expected)
        assert wanted is not None
        came = find_frame(bytes(self._bytes), self._nbytes, expected[-len(self._stamp.bytes) :])
        raise mismatch(wanted, came, self._rank, self._peer)


class _InPlaceReceive(FramedReceive):
    """A receive in place of a payload and its frame; memory behind the frame accepts a small framed tensor."""

    def __init__(self, transport: FramedMessages, buffer: Tensor, peer: int, tag: int, *, is_first: bool) -> None:
        kept, post, stamp = transport.frame_rooms, transport._post_receive, transport.stamp
        room = kept.pop() if kept else torch.zeros(2 * FRAME_BYTES + COPIED, dtype=torch.uint8)
        super().__init__(transport.rank, post, stamp, room[:0], room, peer, tag, NO_LABEL, verify=False)
        self._transport, self._payload, self._key = transport, _bytes_of(buffer), (buffer.dtype, buffer.shape)
        self._head = head_of(NO_LABEL, *self._key, peer, transport.rank)
        self._post_payload = partial(post, self._payload, self._key, peer, tag)
        self._arriving = None if is_first else self._post_payload()
        self._frame: Work | None = self.post()

    def wait(self) -> None:
        if self._frame is None:
            return
        if self._arriving is not None:
            self._arriving.wait()
        self._frame.wait()
        self._frame = None
        if self._arriving is None:
            self._post_payload().wait()
        found = Frame.from_bytes(bytes(self._bytes[:FRAME_BYTES]))
        assert found is not None
        if found.checksum is not None and found.checksum != zlib.crc32(self._payload.numpy().data):
            self._refuse(self._head + self._stamp.bytes)
        self._transport.frame_rooms.append(self._room)

    def _refuse(self, expected: bytes) -> NoReturn:
        self._transport._gone.discard(((self._peer, self._rank), self._key))
        super()._refuse(expected)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, as a view."""
    return tensor.detach().view(-1).view(torch.uint8)
