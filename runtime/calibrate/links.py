"""What ranks say to each other, timed between real processes, and how they share the cores of a machine.

    message      rank 0 ──▶ rank 1 ──▶ rank 0                 half of a round
    all-reduce   ranks 0 … n-1, the others wait               for n = 2, 4, 8; after a product, less the product
    sharing      ranks 0 … n-1 each multiply matrices         by how much a core does less for one of n ranks

Times are those of the clock on the wall, for waiting is what a message is; beside them stands, on a CPU, how long cores
worked for it in all processes, which is what is lost to others that share them. A sum comes after a product, as in
training, for ranks that have computed do not come together at the same moment, as they do in a loop of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from quintsched.descriptions.hardware import Curve

from ..comm import Group, Transport
from ..comm.clock import process_computed_s, settled_s
from ..comm.device import is_accelerator, num_devices
from .processes import run_processes
from .timing import call_s

PARTIES = (2, 4, 8)
"""How many ranks share a sum."""
SIZES: tuple[tuple[int, int], ...] = ((2**10, 80), (2**14, 80), (2**18, 50), (2**20, 30), (2**22, 10), (2**24, 4))
"""Bytes of a message, and how many are measured."""
EDGE = 256
"""Rows and columns of the matrices that ranks multiply side by side."""
BEFORE_EDGE = 384
"""Of those that are multiplied before a sum."""
SHARING_S = 0.4
TIMEOUT_S = 60.0


class Cost(NamedTuple):
    """What a message or a sum of some bytes takes: seconds, and seconds of all ranks' cores together."""

    seconds: float
    work_s: float


class Links(NamedTuple):
    """What was measured between processes; see `descriptions.hardware.Measured`."""

    link: Curve
    link_work: Curve
    all_reduce: dict[int, Curve]
    all_reduce_work: dict[int, Curve]
    sharing: dict[int, float]


def measure_links(device: torch.device) -> Links | None:
    """Return what up to eight processes measure between them; None where there are no two devices for them."""
    devices = num_devices(device)
    num_processes = max(PARTIES) if devices is None else min(devices, max(PARTIES))
    if num_processes < min(PARTIES):
        return None
    messages, sums, rates = run_processes(measure_rank, num_processes, device, TIMEOUT_S)[0]
    return Links(
        *_curves(messages),
        {int(parties): _curves(costs)[0] for parties, costs in sums.items()},
        {int(parties): _curves(costs)[1] for parties, costs in sums.items()},
        {} if is_accelerator(device) else {int(parties): rate / rates["1"] for parties, rate in rates.items()},
    )


def measure_rank(transport: Transport) -> tuple[list[Cost], dict[int, list[Cost]], dict[int, float]]:
    """Measure messages, sums by the number of ranks, and rates by the number of ranks that compute, on one rank."""
    parties = [number for number in PARTIES if number <= transport.world_size]
    groups = {number: _first(transport, number) for number in parties}
    world = _first(transport, transport.world_size)
    transport.open_channels([(0, 1), (1, 0)])
    messages = _messages(transport, groups[2], world)
    sums = {number: _sums(group, world) for number, group in groups.items()}
    rates = {number: _rate(transport.rank < number, world) for number in (1, *parties)}
    return messages, sums, rates


def _first(transport: Transport, number: int) -> Group:
    """Return the group of the first `number` ranks; each of the others is by itself."""
    rest = [(rank,) for rank in range(number, transport.world_size)]
    return transport.make_group([tuple(range(number)), *rest])


def _messages(transport: Transport, pair: Group, world: Group) -> list[Cost]:
    def round_of(tensor: torch.Tensor) -> Callable[[], None]:
        move = (transport.send, transport.recv) if transport.rank == 0 else (transport.recv, transport.send)

        def run() -> None:
            for one_way in move:
                one_way(tensor, 1 - transport.rank, 0).wait()

        return run

    costs = [_cost(round_of, size, number, pair, world) for size, number in SIZES]
    return [Cost(cost.seconds / 2, cost.work_s / 2) for cost in costs]


def _sums(group: Group, world: Group) -> list[Cost]:
    left, right = torch.randn(2, BEFORE_EDGE, BEFORE_EDGE, device=group.device)

    def compute(_: torch.Tensor) -> Callable[[], None]:
        return lambda: _multiply(left, right)

    def compute_and_add(tensor: torch.Tensor) -> Callable[[], None]:
        def run() -> None:
            _multiply(left, right)
            group.all_reduce(tensor).wait()

        return run

    alone = _cost(compute, SIZES[0][0], SIZES[0][1], group, world)
    both = [_cost(compute_and_add, size, number, group, world) for size, number in SIZES]
    return [_less(cost, alone) for cost in both]


def _multiply(left: torch.Tensor, right: torch.Tensor) -> None:
    left @ right


def _less(cost: Cost, alone: Cost) -> Cost:
    """Return what is left without what comes before: a tenth at least, where noise takes more."""
    return Cost(*(max(whole - part, whole / 10) for whole, part in zip(cost, alone, strict=True)))


def _cost(
    call_of: Callable[[torch.Tensor], Callable[[], None]], size: int, number: int, group: Group, world: Group
) -> Cost:
    """Return what a call takes that the ranks of a group make together, while the others wait: the mean of many."""
    seconds, work_s = 0.0, 0.0
    if group.size > 1:
        call = call_of(torch.zeros(size // 4, device=group.device))
        call()
        group.all_reduce(torch.zeros(1, device=group.device)).wait()
        begun_s, begun_work_s = settled_s(group.device), process_computed_s()
        for _ in range(number):
            call()
        seconds = (settled_s(group.device) - begun_s) / number
        work_s = (process_computed_s() - begun_work_s) / number
    total = torch.tensor([work_s], dtype=torch.float64, device=world.device)
    world.all_reduce(total).wait()
    return Cost(seconds, total.item())


def _rate(takes_part: bool, world: Group) -> float:
    """Return the products that a core does in a second for one of the ranks that take part, the mean over them."""
    rate = torch.zeros(2, dtype=torch.float64, device=world.device)
    world.all_reduce(torch.zeros(1, device=world.device)).wait()
    if takes_part:
        left, right = torch.randn(2, EDGE, EDGE, device=world.device)
        rate = rate.new_tensor([1.0 / call_s(lambda: left @ right, world.device, SHARING_S), 1.0])
    world.all_reduce(rate).wait()
    return float(rate[0] / rate[1])


def _curves(costs: list[tuple[float, float]]) -> tuple[Curve, Curve]:
    """Return bytes per second, and bytes per second of cores."""
    sizes = tuple(float(size) for size, _ in SIZES)
    by_time, by_work = (
        Curve(sizes=sizes, rates=tuple(size / max(cost[which], 1e-9) for size, cost in zip(sizes, costs, strict=True)))
        for which in (0, 1)
    )
    return by_time, by_work
