"""Muted wires, on which every message completes at once: only computation and software are left of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from handwritten import Wire
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from quintsched.runtime import Group, Transport
from quintsched.runtime.comm import DoneWork, ReduceOp, Work
from quintsched.runtime.comm.checked.message_frame import Label

DONE = DoneWork()


class MutedTransport(Transport):
    """Wrapper of a rank's real transport that, once muted, completes every message at once.

    The first steps fill the buffers with real values; a muted collective repeats its last result.
    """

    name = "muted"
    profile = "tagged"

    def __init__(self, real: Transport) -> None:
        super().__init__(real.rank, real.world_size, real.device)
        self._real = real
        self.is_muted = False

    def _make_group(self, partition: Sequence[tuple[int, ...]]) -> Group:
        real = self._real.make_group(partition)
        return real if real.size == 1 else MutedGroup(self, real)

    def _open_channels(self, channels: Sequence[tuple[int, int]]) -> None:
        self._real.open_channels(channels)

    def _sender(self, peer: int, tag: int, label: Label) -> Callable[[Tensor], Work]:
        return lambda tensor: DONE if self.is_muted else self._real._send(tensor, peer, tag, label)

    def _receiver(self, buffer: Tensor, peer: int, tag: int, label: Label, room: Tensor | None) -> Callable[[], Work]:
        return lambda: DONE if self.is_muted else self._real._recv(buffer, peer, tag, label)

    def _send(self, tensor: Tensor, peer: int, tag: int, label: Label) -> Work:
        return self._sender(peer, tag, label)(tensor)

    def _recv(self, buffer: Tensor, peer: int, tag: int, label: Label) -> Work:
        return self._receiver(buffer, peer, tag, label, None)()

    def abort(self, error: BaseException) -> None:
        self._real.abort(error)

    def close(self) -> None:
        self._real.close()


class MutedGroup(Group):
    """A group of a muted transport, whose collectives repeat their last result for a tensor of as many numbers.

    What is gathered is repeated by what this rank gave, if it gave that before.
    """

    def __init__(self, transport: MutedTransport, real: Group) -> None:
        super().__init__(real.ranks, real.index, real.device)
        self._transport, self._real = transport, real
        self._given: dict[tuple[str | int, int], Tensor] = {}
        self._gathered: dict[tuple[int, bytes], Tensor] = {}

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        key = op._value_, tensor.numel()
        if self._transport.is_muted:
            tensor.copy_(self._given[key])
            return DONE
        return self._give(key, tensor, lambda: self._real.all_reduce(tensor, op))

    def _give(self, key: tuple[str | int, int], tensor: Tensor, collect: Callable[[], Work]) -> Work:
        if self._transport.is_muted:
            tensor.copy_(self._given[key])
        else:
            collect().wait()
            self._given[key] = tensor.clone()
        return DONE

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        mine = output.numel(), tensor.numpy().tobytes()
        if self._transport.is_muted and mine in self._gathered:
            output.copy_(self._gathered[mine])
            return DONE
        done = self._give(("all_gather", output.numel()), output, lambda: self._real.all_gather(output, tensor))
        self._gathered[mine] = output.clone()
        return done

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        return self._real.reduce_scatter(output, tensor)

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int] | None, sent: Sequence[int] | None
    ) -> Work:
        return self._real.all_to_all(output, tensor, received, sent)

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        if self._transport.is_muted:
            tensor.copy_(self._given[source, tensor.numel()])
            return DONE
        return self._give((source, tensor.numel()), tensor, lambda: self._real.broadcast(tensor, source))


def muted_all_reduce(tensor: Tensor) -> Work:
    tensor.add_(1.0)
    return DONE


def done(*_: object, **__: object) -> Work:
    return DONE


MUTED = Wire(isend=done, irecv=done, all_reduce=muted_all_reduce)


@contextmanager
def muted_torch(rank: int, world_size: int) -> Iterator[Callable[[], None]]:
    """Replace torch.distributed's messages by stubs that complete at once, within a context.

    Buffers are filled with ones until the yielded function is called.
    """

    def receive(tensor: Tensor, *_: object, **__: object) -> Work:
        if state["filling"]:
            tensor.detach().fill_(1)
        return DONE

    state = {"filling": True}
    stubs: dict[str, Any] = {"isend": done, "irecv": receive, "send": done, "recv": receive}
    stubs["batch_isend_irecv"] = lambda ops: [op.op(op.tensor) for op in ops]
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with patch.multiple(dist, **stubs), patch.multiple(dist.distributed_c10d, **stubs):
            yield lambda: state.update(filling=False)
    finally:
        dist.destroy_process_group()
