"""Messages that are not what their receiver expects: all are caught before they are used, over real gloo."""

import os
import random
import re
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quintsched.errors import MisfitError
from quintsched.runtime.comm import Transport, connect
from quintsched.runtime.comm.checked.framed_messages import FramedReceive, room_for
from quintsched.runtime.comm.checked.message_frame import FRAME_BYTES, MESSAGE_KINDS, Label, Stamp, head_of, own_part
from quintsched.runtime.comm.gloo_and_nccl_transports import GlooTransport
from quintsched.runtime.comm.transport_interface import DoneWork

from ..ranks import run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64, torch.bool]
FAULTS = ["shorter", "longer", "type", "shape", "microbatch", "stage", "kind", "place", "step", "cut", "foreign"]


@dataclass(frozen=True)
class Case:
    """A message that is expected, and what is wrong with the one that comes."""

    fault: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    label: Label
    has_room: bool
    pick: int

    @classmethod
    def of(cls, number: int) -> "Case":
        draw = random.Random(number)
        shape = tuple(draw.randint(1, 40) for _ in range(draw.randint(0, 4)))
        label = Label(draw.choice(MESSAGE_KINDS[1:]), draw.randint(0, 3), draw.randint(0, 9), 0, draw.randint(0, 2), 7)
        fault = FAULTS[number % len(FAULTS)]
        return cls(fault, draw.choice(DTYPES), shape, label, draw.random() < 0.5, draw.randint(0, 10**6))

    def expected(self) -> Tensor:
        return torch.arange(1, 1 + torch.Size(self.shape).numel()).to(self.dtype).reshape(self.shape)

    def sent(self) -> tuple[Tensor, Label]:
        """Return what is sent instead, and as what."""
        tensor, label = self.expected(), self.label
        size = tensor.numel()
        if self.fault == "shorter":
            return tensor.flatten()[: self.pick % size], label
        if self.fault == "longer":
            return torch.cat([tensor.flatten(), tensor.flatten()[: 1 + self.pick % size]]), label
        if self.fault == "type":
            most = tensor.nbytes + max(tensor.nbytes, 4096)  # for more gloo ends the receiver
            others = [d for d in DTYPES if d is not self.dtype and size * d.itemsize <= most]
            real = tensor.real if tensor.is_complex() else tensor
            return real.to(others[self.pick % len(others)]), label
        if self.fault == "shape":
            return tensor.reshape(1, *self.shape), label
        if self.fault in ("microbatch", "stage", "place"):
            return tensor, replace(label, **{self.fault: getattr(label, self.fault) + 1})
        if self.fault == "kind":
            return tensor, replace(label, kind=next(kind for kind in MESSAGE_KINDS[1:] if kind != label.kind))
        return tensor, label


def send_wrongly(transport: GlooTransport, case: Case, tag: int) -> None:
    tensor, label = case.sent()
    if case.fault == "cut":
        memory = torch.zeros(tensor.nbytes + FRAME_BYTES, dtype=torch.uint8)
        frame = own_part(0, None) + head_of(label, tensor.dtype, tensor.shape, 0, 1) + transport.stamp.bytes
        memory[tensor.nbytes :] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        transport._post_send(memory[: -1 - case.pick % FRAME_BYTES], (tensor.dtype, tensor.shape), 1, tag).wait()
    elif case.fault == "foreign":
        transport._post_send(tensor.flatten().view(torch.uint8), (tensor.dtype, tensor.shape), 1, tag).wait()
    else:
        if case.fault == "step":
            transport.stamp.begin_run(transport.stamp.step + 1)
        transport.sender(1, tag, label)(tensor).wait()


def receive(transport: Transport, case: Case, tag: int) -> str:
    """Return what is said of a message; empty where it was taken."""
    if case.fault == "step":  # the sender has begun another walk: from here on both are in the same one again
        transport.stamp.begin_run(transport.stamp.step)
    expected = case.expected()
    buffer, room = torch.zeros_like(expected), None
    if case.has_room:
        room = torch.zeros(expected.nbytes + room_for(expected.nbytes), dtype=torch.uint8)
        buffer = room[: expected.nbytes].view(case.dtype).view(case.shape)
    work = transport.receiver(buffer, 0, tag, case.label, room)()
    try:
        work.wait()
    except MisfitError as error:
        assert case.has_room or not buffer.any(), "what came was used"
        return str(error)
    return ""


def run_cases(folder: Path, count: int) -> None:
    rank = int(os.environ["RANK"])
    os.chdir(folder)  # where a verdict is written
    transport = connect("gloo", timeout_s=60)
    assert isinstance(transport, GlooTransport)
    transport.open_channels([(0, 1), (1, 0)])
    said = []
    for number in range(count):
        case = Case.of(number)
        if rank == 0:
            send_wrongly(transport, case, number + 1)
            if case.fault == "step":
                transport.stamp.begin_run(transport.stamp.step - 1)
            good = case.expected()
            transport.sender(1, number + 1, case.label)(good).wait()
        else:
            said.append(receive(transport, case, number + 1))
            if case.fault == "step":
                transport.stamp.begin_run(transport.stamp.step)
            again = torch.zeros_like(case.expected())
            transport.receiver(again, 0, number + 1, case.label)().wait()  # the wire goes on
            assert torch.equal(again, case.expected())
    check_in_place(transport)
    if rank == 1:
        (folder / "said.txt").write_text("\n".join(said))
        transport.send(torch.zeros(1), 0, 0).wait()
    else:
        transport.recv(torch.zeros(1), 1, 0).wait()  # till the other has all
    os._exit(0)  # with sends that nobody takes


def names_both(case: Case, words: str) -> bool:
    """Whether an error names both ends, what was expected, and what came."""
    label, spec = case.label, f"{str(case.dtype).removeprefix('torch.')} {case.shape}"
    start = "rank 1 (instruction 7) received from rank 0 what it did not expect; expected: "
    wanted = f"{start}{label}, {spec}, of step "
    nothing = r"what came has no frame|that came, but not whole"
    came = nothing if case.fault in ("cut", "foreign") else r"what came is: .*\(rank 0, instruction 7\)$"
    return words.startswith(wanted) and re.search(came, words) is not None


@pytest.mark.processes
@pytest.mark.parametrize("count", [88, pytest.param(1100, marks=pytest.mark.slow)])
def test_every_mismatch_is_caught_before_use(tmp_path: Path, count: int) -> None:
    assert run_ranks(run_cases, 2, tmp_path, count) == [0, 0]
    said = (tmp_path / "said.txt").read_text().split("\n")
    assert len(said) == count
    missed = [(Case.of(number), words) for number, words in enumerate(said) if not names_both(Case.of(number), words)]
    assert not missed, missed[:3]


def check_in_place(transport: GlooTransport) -> None:
    """Move tensors that are large without copies; before the first of each kind comes another than is expected."""
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda good: good[:3000],
        lambda good: torch.cat([good, good]),
        lambda good: good.double(),
        lambda good: good.t().contiguous(),
        lambda good: good[:2],
    ]
    for tag, change in enumerate(changes, 1):
        transport.check_everything(tag % 2 == 0)
        good = torch.arange(4000.0 * (100 + tag)).reshape(4000, 100 + tag)
        buffer, kept = torch.zeros_like(good), []
        if transport.rank == 0:
            kept.append(transport.send_in_place(change(good), 1, tag))  # of the large ones nobody takes the payload
            for _ in range(3):
                transport.send_in_place(good, 1, 10 + tag).wait()
            continue
        expected = re.escape(f"expected: message, float32 {(*good.shape,)}")
        with pytest.raises(MisfitError, match=f"{expected}.*what came is: message, "):
            transport.recv_in_place(buffer, 0, tag).wait()
        assert not buffer.any(), "what came was used"
        for _ in range(3):
            transport.recv_in_place(buffer.zero_(), 0, 10 + tag).wait()
            assert torch.equal(buffer, good)
    transport.check_everything(True)
    if transport.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(zlib, "crc32", lambda _: 1)  # as if a bit had changed on the way
            transport.send_in_place(good, 1, 30).wait()
    else:
        with pytest.raises(MisfitError, match="that came, but not whole, or changed on the way"):
            transport.recv_in_place(buffer, 0, 30).wait()


@pytest.mark.parametrize("verify", [True, False])
def test_a_checksum_tells_a_flipped_bit(verify: bool) -> None:
    expected, stamp = torch.arange(5.0), Stamp()
    room = torch.zeros(expected.nbytes + room_for(expected.nbytes), dtype=torch.uint8)
    buffer = room[: expected.nbytes].view(torch.float32)
    place = FramedReceive(1, lambda *_: DoneWork(), stamp, buffer, room, 0, 3, Label(), verify=verify)
    work = place.post()
    checksum = zlib.crc32(expected.numpy().tobytes()) if verify else None
    frame = own_part(-1, checksum) + head_of(Label(), torch.float32, (5,), 0, 1) + stamp.bytes
    sent = bytearray(expected.numpy().tobytes() + frame)
    sent[6] ^= 1
    room[: len(sent)] = torch.frombuffer(sent, dtype=torch.uint8)
    said = "that came, but not whole, or changed on the way"
    with pytest.raises(MisfitError, match=said) if verify else nullcontext():
        work.wait()
