"""One rank of two that walks a plan's messages over torch.distributed, under a profile, and says where it stands.

python -m tests.gpu.replay_worker nccl FOLDER PLAN.json PROFILE BYTES LIMIT_S      (started by `Machine.run`)

    profile          process groups (on NCCL a communicator and a stream each)
    blocking         one per pair of ranks; the host waits for each message before it goes on
    single-stream    one, made eagerly: torch then has no communicator beside it for messages
    pair-stream      one per pair of ranks
    channel          one per directed pair

A computation is a wait of the current stream for what the instruction takes; later messages are issued from there.
FOLDER gets a file per rank: the index of its first message that did not end within the limit, -1 if all did.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

import quintsched as qs
from quintsched.ir.dataflow_analysis import Value, flow
from quintsched.ir.instruction_set import Message, Send

Channel = tuple[int, int]
Links = dict[Channel, dist.ProcessGroup]

LINK_OF: dict[str, Callable[[Channel], Channel]] = {
    "blocking": lambda channel: (min(channel), max(channel)),
    "single-stream": lambda channel: (0, 0),
    "pair-stream": lambda channel: (min(channel), max(channel)),
    "channel": lambda channel: channel,
}
"""Channels that share a process group, by transport profile."""


class Posted:
    """A message that was posted. Gloo does not say when one has ended, so a thread waits for it there."""

    def __init__(self, work: dist.Work, device: torch.device) -> None:
        self._work, self._ended = work, threading.Event()
        self._on_host = device.type == "cpu"
        if self._on_host:
            threading.Thread(target=self._watch, daemon=True).start()

    def wait(self) -> None:
        """Let the current stream wait for it; on a CPU, the caller."""
        if self._on_host:
            self._ended.wait()
        else:
            self._work.wait()

    def has_ended(self) -> bool:
        return self._ended.is_set() if self._on_host else self._work.is_completed()

    def _watch(self) -> None:
        self._work.wait()
        self._ended.set()


def open_links(profile: str, device: torch.device) -> Links:
    """Make the process groups of a profile, and use each channel once: NCCL connects at the first message."""
    channels = [(0, 1), (1, 0)]
    eager = device if profile == "single-stream" and device.type == "cuda" else None
    made = {name: dist.new_group(device_id=eager) for name in dict.fromkeys(map(LINK_OF[profile], channels))}
    links = {channel: made[LINK_OF[profile](channel)] for channel in channels}
    for channel in channels:
        post(links, channel, torch.zeros(1, device=device)).wait()
        synchronize(device)
    return links


def post(links: Links, channel: Channel, tensor: torch.Tensor) -> Posted:
    """Send or receive, whichever end of the channel this rank is."""
    source, destination = channel
    link = links[channel]
    sends = dist.get_rank() == source
    work = link.send([tensor], destination, 0) if sends else link.recv([tensor], source, 0)
    return Posted(work, tensor.device)


def replay(plan: qs.Plan, links: Links, device: torch.device, *, size: int, blocking: bool, limit_s: float) -> int:
    """Return where this rank stands after `limit_s` without progress; -1 where every message of `size` bytes ended."""
    rank = dist.get_rank()
    issued: list[tuple[int, Posted]] = []
    arriving: dict[Value, Posted] = {}
    outgoing = torch.ones(size, dtype=torch.uint8, device=device)
    for index, instruction in enumerate(plan.programs[rank]):
        taken_and_made = flow(instruction, plan.layout, rank)
        if not isinstance(instruction, Message):
            for value in taken_and_made.consumes:
                if value in arriving:
                    arriving.pop(value).wait()
            continue
        sends = isinstance(instruction, Send)
        channel = (rank, instruction.peer) if sends else (instruction.peer, rank)
        work = post(links, channel, outgoing if sends else torch.empty_like(outgoing))
        issued.append((index, work))
        if not sends:
            arriving[taken_and_made.produces[0]] = work
        if blocking and first_unfinished(issued[-1:], limit_s) >= 0:
            return index
    return first_unfinished(issued, limit_s)


def first_unfinished(issued: Sequence[tuple[int, Posted]], limit_s: float) -> int:
    """Return the index of the first message that has not ended after `limit_s` in which none did; -1 if all ended."""
    deadline = time.monotonic() + limit_s
    waiting = list(issued)
    while waiting and time.monotonic() < deadline:
        time.sleep(0.01)
        left = [(index, work) for index, work in waiting if not work.has_ended()]
        if len(left) < len(waiting):
            waiting, deadline = left, time.monotonic() + limit_s
    return waiting[0][0] if waiting else -1


def end_what_hangs(backend: str) -> None:
    """Abort the communicators: a process that ends under a hanging kernel ends others of a multi-process service."""
    if backend == "nccl":
        aborting = threading.Thread(target=dist.distributed_c10d._abort_process_group, daemon=True)
        aborting.start()
        aborting.join(timeout=20)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(backend: str, folder: Path, plan: qs.Plan, profile: str, size: int, limit_s: float) -> NoReturn:
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    links = open_links(profile, device)
    standing = replay(plan, links, device, size=size, blocking=profile == "blocking", limit_s=limit_s)
    (folder / f"{dist.get_rank()}.txt").write_text(str(standing))
    while not all((folder / f"{rank}.txt").exists() for rank in range(dist.get_world_size())):
        time.sleep(0.1)
    end_what_hangs(backend)
    os._exit(0)  # what hangs would hold up an orderly end


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), qs.Plan.load(sys.argv[3]), sys.argv[4], int(sys.argv[5]), float(sys.argv[6]))
