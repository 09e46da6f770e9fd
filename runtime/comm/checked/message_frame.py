"""Frames of messages: a trailer behind the payload with its dtype and shape, instruction and step.

    ┌─────── payload: nbytes ───────┬──────────────────────── frame: 128 bytes ────────────────────────┐
    │ numbers of the tensor         │ sender's │ magic type kind place stage microbatch … dims step run │
    └───────────────────────────────┴──────────┴──────────────── the same on both ends ─────────────────┘

The receiver knows the exact bytes at the end of the expected frame. A message that is shorter or longer has its end
elsewhere, or none: only then its buffer is searched for the actual frame. The end of an earlier message's frame cannot
be mistaken for it, since it is wiped before a receive is posted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from quintsched.errors import MisfitError

MAGIC = b"qsF1"
FRAME_BYTES = 128
_DIMS = 6
_HEAD = struct.Struct(f"<4sBBBxiiiiiiQ{_DIMS}Q")
"""Magic, type, dimensions, kind; place, stage, microbatch, slice, source, destination; bytes; shape."""
_STAMP = struct.Struct("<qq")
_OWN = struct.Struct("<iII")
_COMMON = _HEAD.size + _STAMP.size
OWN_BYTES = FRAME_BYTES - _COMMON
"""Size of a frame's first part, which only the sender knows; the rest is the same on both ends."""

WIPED = b"\xff" * 8
"""Bytes at the end of the frame until a message has come."""

MESSAGE_KINDS = (
    "message",
    "activation",
    "gradient",
    "skip",
    "gradient of a skip",
    "lent activations",
    "sizes of lent activations",
)
FRAME_DTYPES = tuple(sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str))
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(FRAME_DTYPES)}
_NO_INSTRUCTION = -1


def describe_spec(dtype: torch.dtype, shape: Sequence[object]) -> str:
    """Return dtype and shape in short, for error messages: "float32 (2, 3)"."""
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


@dataclass(frozen=True)
class Label:
    """Purpose of a message; the same on both ends, but for the instruction.

    Attributes:
        kind: one of `MESSAGE_KINDS`; a "message" belongs to no stage.
        stage: the stage whose output, or gradient of an output, it is.
        place: index of the tensor, where there are several.
        instruction: its index in this end's program.
    """

    kind: str = "message"
    stage: int = -1
    microbatch: int = -1
    slice: int = 0
    place: int = 0
    instruction: int = _NO_INSTRUCTION

    @property
    def same(self) -> tuple[str, int, int, int, int]:
        """Fields that are the same on both ends."""
        return self.kind, self.stage, self.microbatch, self.slice, self.place

    def __str__(self) -> str:
        if self.stage < 0:
            return self.kind
        of_several = f", its tensor {self.place}" if self.place else ""
        cut = f", slice {self.slice}" if self.slice else ""
        return f"{self.kind} of stage {self.stage}{of_several}, microbatch {self.microbatch}{cut}"


NO_LABEL = Label()


class Stamp:
    """Step of all messages of one run of a program.

    Attributes:
        step: the number of the step, from 1.
        bytes: its encoding in frames.
    """

    def __init__(self) -> None:
        self._run = 0
        self.begin_run(0)

    def begin_run(self, step: int) -> None:
        """Begin another run, of a step or an evaluation; all ranks do so alike."""
        self._run += 1
        self.step, self.bytes = step, _STAMP.pack(step, self._run)


def head_of(label: Label, dtype: torch.dtype, shape: Sequence[int], source: int, destination: int) -> bytes:
    """Return the part of a frame that both ends know, without the step."""
    dims = (
        [*shape[: _DIMS - 1], prod(shape[_DIMS - 1 :])]
        if len(shape) >= _DIMS
        else [*shape, *[0] * (_DIMS - len(shape))]
    )
    nbytes = prod(shape) * dtype.itemsize
    return _HEAD.pack(
        MAGIC,
        _DTYPE_CODES[dtype],
        len(shape),
        MESSAGE_KINDS.index(label.kind),
        label.place,
        label.stage,
        label.microbatch,
        label.slice,
        source,
        destination,
        nbytes,
        *dims,
    )


def own_part(instruction: int, checksum: int | None) -> bytes:
    """Return the first part of a frame, which only the sender knows."""
    return _OWN.pack(instruction, int(checksum is not None), checksum or 0).ljust(OWN_BYTES, b"\0")


@dataclass(frozen=True)
class Frame:
    """A decoded frame."""

    label: Label
    spec: str
    nbytes: int
    source: int
    destination: int
    step: int
    checksum: int | None

    @classmethod
    def from_bytes(cls, data: bytes) -> Frame | None:
        """Return the frame at the start of these bytes; None where there is none, or an invalid one."""
        if len(data) < FRAME_BYTES or data[OWN_BYTES : OWN_BYTES + len(MAGIC)] != MAGIC:
            return None
        instruction, has_checksum, checksum = _OWN.unpack_from(data)
        head = _HEAD.unpack_from(data, OWN_BYTES)
        _, code, ndim, kind, place, stage, microbatch, cut, source, destination, nbytes, *dims = head
        step, _ = _STAMP.unpack_from(data, OWN_BYTES + _HEAD.size)
        if code >= len(FRAME_DTYPES) or kind >= len(MESSAGE_KINDS):
            return None
        shape = tuple(dims[:ndim]) if ndim <= _DIMS else (*dims[:-1], "…")
        label = Label(MESSAGE_KINDS[kind], stage, microbatch, cut, place, instruction)
        return cls(
            label,
            describe_spec(FRAME_DTYPES[code], shape),
            nbytes,
            source,
            destination,
            step,
            checksum if has_checksum else None,
        )

    def __str__(self) -> str:
        where = "" if self.label.instruction == _NO_INSTRUCTION else f", instruction {self.label.instruction}"
        return f"{self.label}, {self.spec}, of step {self.step} (rank {self.source}{where})"


def find_frame(data: bytes, at: int, stamp: bytes) -> Frame | None:
    """Return the frame of a received message: at its place, or one of this step at the place its own length implies."""
    found = Frame.from_bytes(data[at : at + FRAME_BYTES])
    if found is not None and data[at + FRAME_BYTES - len(WIPED) : at + FRAME_BYTES] != WIPED:
        return found
    end = data.find(stamp)
    while end >= 0:
        at = end + len(stamp) - FRAME_BYTES
        found = Frame.from_bytes(data[at : at + FRAME_BYTES]) if at >= 0 else None
        if found is not None and found.nbytes == at:
            return found
        end = data.find(stamp, end + 1)
    return None


def mismatch(expected: Frame, came: Frame | None, receiver: int, sender: int) -> MisfitError:
    """Return the error for a message that is not the expected one."""
    label = expected.label
    where = "" if label.instruction == _NO_INSTRUCTION else f" (instruction {label.instruction})"
    wanted = f"{label}, {expected.spec}, of step {expected.step}"
    if came is None:
        what = "what came has no frame where it ends: it was cut or changed on the way"
    elif str(came) != str(replace(expected, label=came.label, source=came.source)) or came.label.same != label.same:
        what = f"what came is: {came}"
    else:
        what = "that came, but not whole, or changed on the way, or of another walk through the step"
    return MisfitError(
        f"rank {receiver}{where} received from rank {sender} what it did not expect; expected: {wanted}; {what}"
    )
