"""Communication between ranks, timed between real processes, and their sharing of a machine's cores.

    message      rank 0 ──▶ rank 1 ──▶ rank 0                     half of a round trip
    sum          ranks 0 … n-1, the others wait                   an all-reduce, for n = 2, 4, 8
    lost         all ranks, in a chain or in groups of n:         core time not spent on computing meanwhile, whether
                 ▓▓ ▶ ▓▓ ▶ ▓▓ ▶ with messages, and without        on messages or on waiting for them
    sharing      ranks 0 … n-1 each multiply matrices             slowdown of a core for one of n ranks

Sums, and messages where losses are concerned, are timed after a little training, less its duration: ranks that have
computed do not arrive at the same moment, as they do in a loop of sums, and a rank that waits on a core that others
use meanwhile finds its caches empty.

Also processes that communicate over gloo or NCCL, and end with the call whatever happens.

run_processes(work, 4, …)   ──▶  work(transport 0, …)   work(transport 1, …)   …   ──▶  the results by rank

Also the number of cores that this process may use.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate, cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional

from quintsched.errors import StallError
from quintsched.strategies.descriptions.hardware import Curve

from ..comm import Group, ReduceOp, Transport, Work, connect
from ..comm.clocks import now_s, settled_s
from ..comm.device import is_accelerator, library_of, num_devices, use_device
from ..watch.rendezvous.network_addresses import choose_interfaces
from .time_operations import call_s

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Linux' file of a container's CPU quota: microseconds of work per period, and the period."""


def count_cores() -> int:
    """Return the number of cores that this process may use: its affinity, or fewer with a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text().split()
        return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores


PARTIES = (2, 4, 8)
"""Numbers of ranks in a sum."""
SIZES = (2**10, 2**14, 2**18, 2**20, 2**22, 2**24)
"""Bytes of a message."""
MOST_CALLS, MOST_BYTES = 20, 2**26
"""Number of calls per measurement, and limit of their total bytes."""
FEWEST_CALLS, POINT_S = 3, 0.4
"""Number of calls of a measurement that takes longer than so many seconds."""
LATE_S = 30.0
"""Seconds after which each measurement is one call, so that a busy machine is not measured for long."""
ROWS, INPUTS, OUTPUTS = 256, 256, 512
"""Sizes of the layers that are trained before a sum or a message."""
LAYERS, LAYERS_AT_A_TIME = 32, 3
"""Number of layers that take turns, and of those before one sum."""
EDGE = 256
"""Rows and columns of matrices that ranks multiply side by side."""
SHARING_S = 0.4
TIMEOUT_S = 180.0

TimedCall = Callable[[], object]


class Links(NamedTuple):
    """Results between processes; see `descriptions.hardware.Measured`."""

    link: Curve
    link_work: Curve | None
    all_reduce: dict[int, Curve]
    all_reduce_work: dict[int, Curve]
    sharing: dict[int, float]


class SecondsBySize(NamedTuple):
    """Seconds by size, the same on all ranks: of messages, and of sums by their number of ranks."""

    messages: list[float]
    lost: list[float]
    """Core seconds lost by a message while all ranks compute; empty where they share no cores."""
    sums: dict[int, list[float]]
    lost_by_sums: dict[int, list[float]]
    rates: dict[int, float]
    """Matrix products per second of a core, for one of so many ranks."""


def measure_links(device: torch.device) -> Links | None:
    """Return measurements between up to eight processes; None where there are no two devices for them."""
    devices = num_devices(device)
    num_processes = max(PARTIES) if devices is None else min(devices, max(PARTIES))
    if num_processes < min(PARTIES):
        return None
    found = SecondsBySize(*run_processes(measure_rank, num_processes, device, TIMEOUT_S)[0])
    return Links(
        link=_curve(found.messages),
        link_work=_curve(found.lost) if found.lost else None,
        all_reduce={int(parties): _curve(seconds) for parties, seconds in found.sums.items()},
        all_reduce_work={int(parties): _curve(seconds) for parties, seconds in found.lost_by_sums.items()},
        sharing={int(parties): rate / next(iter(found.rates.values())) for parties, rate in found.rates.items()},
    )


def measure_rank(transport: Transport) -> SecondsBySize:
    """Measure on one rank; all ranks call this."""
    return _MeasuringRank(transport).measure()


class _MeasuringRank:
    """One of the ranks that measure together."""

    def __init__(self, transport: Transport) -> None:
        self.transport, self.rank, self.ranks = transport, transport.rank, transport.world_size
        self.shares_cores, self._begun_s = not is_accelerator(transport.device), now_s()
        self.world = transport.make_group([tuple(range(self.ranks))])
        transport.open_channels([(rank, rank + 1) for rank in range(self.ranks - 1)] + [(1, 0)])
        self._given = torch.randn(ROWS, INPUTS, device=transport.device)
        weights = torch.randn(LAYERS, INPUTS, OUTPUTS, device=transport.device)
        self._layers = cycle(zip(weights, torch.zeros_like(weights), strict=True))

    def measure(self) -> SecondsBySize:
        """Return all measurements."""
        parties = [number for number in PARTIES if number <= self.ranks]
        messages = [self._round_s(size) / 2 for size in SIZES]
        sums = {number: self._sums(number, 1) for number in parties}
        if not self.shares_cores:
            return SecondsBySize(messages, [], sums, {}, {})
        return SecondsBySize(
            messages=messages,
            lost=self._lost_by_messages(),
            sums=sums,
            lost_by_sums={number: self._lost_by_sums(number, sums[number]) for number in parties},
            rates={number: self._rate(number) for number in (1, *parties)},
        )

    def _round_s(self, size: int) -> float:
        tensor, peer = self._tensor(size), 1 - self.rank
        moves = (self.transport.send, self.transport.recv)

        def there_and_back() -> None:
            for move in moves if self.rank == 0 else reversed(moves):
                move(tensor, peer, 0).wait()

        return self._together_s(there_and_back, size, 2)

    def _sums(self, number: int, groups: int) -> list[float]:
        """Return the seconds of sums in groups of `number` ranks side by side; ranks beyond these wait, each alone."""
        busy = groups * number
        together = [tuple(range(first, first + number)) for first in range(0, busy, number)]
        group = self.transport.make_group([*together, *((rank,) for rank in range(busy, self.ranks))])
        return self._after_layers_s(lambda size: partial_sum(group, self._tensor(size)), busy)

    def _lost_by_sums(self, number: int, of_one: Sequence[float]) -> list[float]:
        """Return core seconds lost by a sum in one group of `number` ranks, while all ranks are in such groups.

        `of_one`: the seconds where there is one group.
        """
        groups = self.ranks // number
        seconds = of_one if groups == 1 else self._sums(number, groups)
        return [taken * self._cores / groups for taken in seconds]

    def _lost_by_messages(self) -> list[float]:
        """Return core seconds lost by a message from one rank to the next, all ranks being in a chain."""
        return [taken * self._cores / (self.ranks - 1) for taken in self._after_layers_s(self._chain, self.ranks)]

    def _chain(self, size: int) -> TimedCall:
        """Return a call that receives from the rank before and sends to the next, without waiting for the send."""
        arriving, leaving = self._tensor(size), self._tensor(size)
        sent: list[Work] = []

        def pass_on() -> None:
            while sent:
                sent.pop().wait()
            if self.rank + 1 < self.ranks:
                sent.append(self.transport.send(leaving, self.rank + 1, 0))
            if self.rank:
                self.transport.recv(arriving, self.rank - 1, 0).wait()

        return pass_on

    @property
    def _cores(self) -> int:
        return min(count_cores(), self.ranks)

    def _after_layers_s(self, call_of: Callable[[int], TimedCall], number: int) -> list[float]:
        """Return the seconds of calls by size, after some layers, less their time; at least a tenth of both.

        The layers alone are timed before and after all sizes, since a machine is not equally fast all the time.
        """

        def both(call: TimedCall) -> TimedCall:
            def run() -> None:
                self._train()
                call()

            return run

        before = self._together_s(self._train, 1, number)
        whole = [self._together_s(both(call_of(size)), size, number) for size in SIZES]
        alone = (before + self._together_s(self._train, 1, number)) / 2
        return [max(taken - alone, taken / 10) for taken in whole]

    def _train(self) -> None:
        """Compute forward and weight gradients of some layers; others than the last time, so that caches are cold."""
        for weight, gradient in islice(self._layers, LAYERS_AT_A_TIME):
            gradient.add_(self._given.T @ functional.gelu(self._given @ weight))

    def _together_s(self, call: TimedCall, size: int, number: int) -> float:
        """Return the seconds of a call by the first `number` ranks side by side: the mean of the slowest rank.

        The first call says how many there are time for, on a machine that is slow or busy; it stays the only one where
        it is late already.
        """
        taken, since_begin = self._timed_s(call, 1, number)
        if since_begin > LATE_S:
            return taken
        most = max(1, min(MOST_CALLS, MOST_BYTES // size))
        return self._timed_s(call, min(most, max(FEWEST_CALLS, int(POINT_S / taken))), number)[0]

    def _timed_s(self, call: TimedCall, calls: int, number: int) -> tuple[float, float]:
        """Return the mean seconds of some calls by the slowest of the first `number` ranks, and those since the begin.

        All ranks wait for them, and have the same result.
        """
        taken = torch.zeros(2, dtype=torch.float64, device=self.transport.device)
        if self.rank < number:
            begun_s = settled_s(self.transport.device)
            for _ in range(calls):
                call()
            taken[0] = (settled_s(self.transport.device) - begun_s) / calls
        taken[1] = now_s() - self._begun_s
        self.world.all_reduce(taken, ReduceOp.MAX).wait()
        slowest_s, since_begin_s = taken.tolist()
        return slowest_s, since_begin_s

    def _rate(self, number: int) -> float:
        """Return the matrix products per second of a core, averaged over the first `number` ranks."""
        rate = torch.zeros(1, dtype=torch.float64)
        self.world.all_reduce(torch.zeros(1)).wait()
        if self.rank < number:
            left, right = torch.randn(2, EDGE, EDGE)
            rate += 1.0 / call_s(lambda: left @ right, self.transport.device, SHARING_S) / number
        self.world.all_reduce(rate).wait()
        return rate.item()

    def _tensor(self, size: int) -> torch.Tensor:
        return torch.zeros(size // 4, device=self.transport.device)


def partial_sum(group: Group, tensor: torch.Tensor) -> TimedCall:
    """Return a call that all-reduces a tensor over a group."""
    return lambda: group.all_reduce(tensor).wait()


def _curve(seconds: Sequence[float]) -> Curve:
    """Return bytes per second by size; a time longer than a larger size's was disturbed, and is replaced by it."""
    undisturbed = list(accumulate(reversed(seconds), min))[::-1]
    sizes = tuple(float(size) for size in SIZES)
    return Curve(sizes=sizes, rates=tuple(size / taken for size, taken in zip(sizes, undisturbed, strict=True)))


def run_processes(
    work: Callable[[Transport], Any], num_processes: int, device: torch.device, timeout_s: float
) -> list[Any]:
    """Return `work(transport)` of fresh processes, by rank; results travel as JSON.

    `work` is a function of a module, by whose name the processes find it. Each uses one thread, as the ranks of a run,
    and is forked from a server that has imported torch, with the environment that the first call found. Raises an
    exception of a process, and `StallError` after `timeout_s`; none of the processes outlives the call.
    """
    multiprocessing.set_forkserver_preload([__name__])
    with TemporaryDirectory() as folder:
        context = start_processes(
            _enter,
            args=(work, num_processes, folder, device.type, timeout_s),
            nprocs=num_processes,
            join=False,
            daemon=True,
            start_method="forkserver",
        )
        deadline = now_s() + timeout_s
        try:
            while not context.join(timeout=max(0.0, deadline - now_s())):
                if now_s() > deadline:
                    raise StallError(f"{num_processes} processes that measure links took longer than {timeout_s:g} s")
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(num_processes)]


def _enter(
    rank: int, work: Callable[[Transport], Any], num_processes: int, folder: str, kind: str, timeout_s: float
) -> None:
    torch.set_num_threads(1)
    library = library_of(use_device(torch.device(kind), rank))
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(num_processes)
    choose_interfaces()
    dist.init_process_group(
        library,
        f"file://{folder}/store",
        timeout=timedelta(seconds=timeout_s),
        rank=rank,
        world_size=num_processes,
    )
    transport = connect(library, timeout_s)
    Path(folder, f"{rank}.json").write_text(json.dumps(work(transport)))
    dist.barrier()
    transport.close()
    dist.destroy_process_group()
