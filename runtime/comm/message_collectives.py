"""Collectives built from point-to-point messages, as a plan's collective programs (mini-plans) specify.

    all_reduce(flat)     flat = [chunk 0 | chunk 1 | chunk 2]            views into the caller's tensor, no copies
    rank 0, a ring of 3  recv chunk 1 from rank 2 into scratch, send chunk 2 to rank 1, wait for both, add, …

`SpelledGroup` replaces the replicas' group where the plan's communication asks for it. A collective without a mini-plan
is run by the library, and so is everything but sums and gathers.

Progress: on a transport whose waits block the host (gloo, in process) a collective is queued, and `wait` runs its
steps, after those of all collectives issued before it. So nothing progresses during a backward, and all members have to
wait in the same order. On CUDA the host issues all steps at once, on a stream of the group, beside computation. Either
way the messages of a channel have one order on both of its ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from quintsched.collectives.collective_program import (
    CollectiveKind,
    CollectiveProgram,
    CollectiveStep,
    RecvChunk,
    SendChunk,
    SendRecv,
)
from quintsched.collectives.gradient_exchange import choose
from quintsched.ir.collective_means_and_wire import Communication
from quintsched.ir.mesh import EXPERT_REPLICA_AXES, REPLICA_AXES
from quintsched.plan import Plan

from ..watch.position_in_shared_memory import NOTHING
from . import Group, ReduceOp, Transport, Work
from .device import current_stream, is_accelerator, new_stream, on_stream
from .transport_interface import DoneWork

SPELLED_TAG = 2
"""Tag of all chunks: ring attention, whose messages may have the same ends, uses 0 and 1."""


class SpelledGroup(Group):
    """A group of several ranks whose sums and gathers run by a plan's mini-plans.

    `group` is the library's, of the same ranks; the mini-plans' channels are open (`spelled_channels`).
    """

    def __init__(self, group: Group, communication: Communication, transport: Transport) -> None:
        super().__init__(group.ranks, group.index, group.device)
        self.wait_cell, self.wait_code = group.wait_cell, group.wait_code
        self._native = group
        self._communication = communication
        self._transport = transport
        self._queue: deque[SpelledWork] = deque()
        self._stream = new_stream(group.device)
        self._scratch = torch.empty(0)

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Work:
        plan = self._choose("all_reduce", tensor) if op is ReduceOp.SUM else None
        if plan is None:
            return self._native._all_reduce(tensor, op)
        return self._issue(partial(self._carry_out, plan, tensor.view(-1)), tensor)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        plan = self._choose("all_gather", output)
        if plan is None:
            return self._native._all_gather(output, tensor)
        return self._issue(partial(self._gather, plan, output.view(-1), tensor.view(-1)), output, tensor)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor) -> Work:
        plan = self._choose("reduce_scatter", tensor)
        if plan is None:
            return self._native._reduce_scatter(output, tensor)
        return self._issue(partial(self._scatter, plan, output.view(-1), tensor.view(-1)), output, tensor)

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int] | None, sent: Sequence[int] | None
    ) -> Work:
        return self._native._all_to_all(output, tensor, received, sent)

    def _broadcast(self, tensor: Tensor, source: int) -> Work:
        return self._native._broadcast(tensor, source)

    def _choose(self, kind: CollectiveKind, whole: Tensor) -> CollectiveProgram | None:
        return choose(self._communication, kind, self.size, whole.nbytes)

    def _issue(self, steps: Callable[[], None], *tensors: Tensor) -> Work:
        work = SpelledWork(self, steps, tensors)
        self._queue.append(work)
        if self._stream is not None:
            self._stream.wait_stream(current_stream(self.device))
            self.drive(work)
        return work

    def drive(self, until: SpelledWork) -> None:
        """Run all collectives issued up to `until`; nothing where they have run already."""
        cell = self.wait_cell
        while until in self._queue:
            work = self._queue.popleft()
            cell.memory[cell.at] = self.wait_code
            with on_stream(self._stream):
                work.carry_out()
            cell.memory[cell.at] = NOTHING

    def _gather(self, plan: CollectiveProgram, whole: Tensor, shard: Tensor) -> None:
        whole.view(self.size, -1)[self.index].copy_(shard)
        self._carry_out(plan, whole)

    def _scatter(self, plan: CollectiveProgram, shard: Tensor, whole: Tensor) -> None:
        in_place = self.is_shard_in_place(shard, whole)
        sums = whole if in_place else whole.clone()
        self._carry_out(plan, sums)
        if not in_place:
            shard.copy_(sums.view(self.size, -1)[self.index])

    def _carry_out(self, plan: CollectiveProgram, flat: Tensor) -> None:
        """Run this rank's steps on the chunks of a flat tensor."""
        chunks = cut_chunks(flat, plan.chunks)
        largest = max(chunks, key=Tensor.numel)
        if self._scratch.numel() < largest.numel() or self._scratch.dtype != flat.dtype:
            self._scratch = torch.empty_like(largest)  # kept, as new memory would be mapped page by page each time
        for step in plan.programs[self.index]:
            self._take(step, chunks, self._scratch)

    def _take(self, step: CollectiveStep, chunks: Sequence[Tensor], scratch: Tensor) -> None:
        """Post the receive, then the send, wait for both, and add the received chunk; empty chunks are not sent."""
        match step:
            case SendRecv():
                arriving, add = self._receive(chunks[step.recv_chunk], step.source, step.reduce, scratch)
                leaving = self._send(chunks[step.send_chunk], step.to)
                arriving.wait()
                leaving.wait()
                add()
            case SendChunk():
                self._send(chunks[step.chunk], step.to).wait()
            case RecvChunk():
                arriving, add = self._receive(chunks[step.chunk], step.source, step.reduce, scratch)
                arriving.wait()
                add()

    def _send(self, chunk: Tensor, to: int) -> Work:
        return self._transport.send_in_place(chunk, self.ranks[to], SPELLED_TAG) if chunk.numel() else DoneWork()

    def _receive(self, chunk: Tensor, source: int, reduce: bool, scratch: Tensor) -> tuple[Work, Callable[[], object]]:
        """Post a receive; return its work, and a function that adds the received data to the chunk."""
        buffer = scratch[: chunk.numel()] if reduce else chunk
        work = self._transport.recv_in_place(buffer, self.ranks[source], SPELLED_TAG) if chunk.numel() else DoneWork()
        return work, partial(chunk.add_, buffer) if reduce else DoneWork().wait


class SpelledWork:
    """A queued collective of a `SpelledGroup`; it keeps its tensors until it has been waited for."""

    def __init__(self, group: SpelledGroup, steps: Callable[[], None], tensors: tuple[Tensor, ...]) -> None:
        self._group, self._tensors = group, tensors
        self._steps: Callable[[], None] | None = steps
        self._done: torch.Event | None = None

    def carry_out(self) -> None:
        """Run all steps; on CUDA, issue them on the current stream."""
        if self._steps is not None:
            self._steps()
        self._steps = None
        if is_accelerator(self._group.device):
            self._done = current_stream(self._group.device).record_event()

    def wait(self) -> None:
        """Run the remaining steps, of this and all earlier collectives; on CUDA make the stream wait."""
        self._group.drive(self)
        if self._done is not None:
            current_stream(self._group.device).wait_event(self._done)
        self._tensors = ()


def cut_chunks(flat: Tensor, chunks: int) -> list[Tensor]:
    """Return consecutive views of a flat tensor, whose sizes differ by 1 at most.

    Where the number of ranks divides the elements, and the chunks too, every rank's shard is whole chunks.
    """
    bounds = [flat.numel() * chunk // chunks for chunk in range(chunks + 1)]
    return [flat[first:end] for first, end in pairwise(bounds)]


def spell_out(group: Group, communication: Communication, transport: Transport) -> Group:
    """Return a group whose collectives follow the plan; the group itself where that is native, or has one rank."""
    return SpelledGroup(group, communication, transport) if communication.plans and group.size > 1 else group


def spelled_channels(plan: Plan) -> list[tuple[int, int]]:
    """Return the directed channels of all mini-plans, between the replicas of every stage."""
    if not plan.communication.plans:
        return []
    lines = {*plan.mesh.groups(*REPLICA_AXES), *plan.mesh.groups(*EXPERT_REPLICA_AXES)}
    return sorted(
        {
            (line[source], line[target])
            for line in lines
            for mini in plan.communication.plans.values()
            if mini.size == len(line)
            for source, target in {(message.sent.rank, message.received.rank) for message in mini.messages}
        }
    )
