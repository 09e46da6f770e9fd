"""How long a call takes: the median of many, on the clock that fits the device.

cpu            seconds that a core has worked for this thread: what others do on the machine meanwhile does not count
accelerator    seconds until the device is done, many calls at a time: the host runs ahead
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from quintsched.strategies.descriptions.hardware import Curve

from ..comm.clock import now_s, settled_s, thread_computed_s
from ..comm.device import is_accelerator

SHORTEST_S = {False: 50e-6, True: 2e-3}
"""A sample is of so many calls that it takes at least this long: on an accelerator the wait for its end counts too."""
FEWEST_SAMPLES = 3


def call_s(call: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Return the median seconds of a call, which is made until the budget is used up, and at least a few times."""
    read = partial(settled_s, device) if is_accelerator(device) else thread_computed_s
    call()
    number = _calls_per_sample(call, read, SHORTEST_S[is_accelerator(device)])
    samples: list[float] = []
    end = now_s() + budget_s
    while len(samples) < FEWEST_SAMPLES or now_s() < end:
        samples.append(_sample_s(call, read, number))
    return median(samples)


def curve_of(sizes: Sequence[float], seconds: Sequence[float]) -> Curve:
    """Return the rates of calls of these sizes that took so many seconds."""
    return Curve(sizes=tuple(sizes), rates=tuple(size / took for size, took in zip(sizes, seconds, strict=True)))


def _calls_per_sample(call: Callable[[], object], read: Callable[[], float], shortest_s: float) -> int:
    number = 1
    while _sample_s(call, read, number) * number < shortest_s:
        number *= 2
    return number


def _sample_s(call: Callable[[], object], read: Callable[[], float], number: int) -> float:
    begin = read()
    for _ in range(number):
        call()
    return (read() - begin) / number
