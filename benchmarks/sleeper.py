"""Blocks that sleep instead of computing, to within a few hundredths of a millisecond."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quintsched.runtime.autograd.deferred_weight_grads import defer
from quintsched.runtime.autograd.slice_kv_cache import Past

LONGEST = 4.0
"""Longest unit: of longer inputs, as a block gets them where it is examined, it does not sleep."""


@dataclass(frozen=True)
class Pace:
    """Sleep of a stage for one unit of length 1, in seconds; the values of its input are its length."""

    forward_s: float
    input_s: float
    weight_s: float


class Sleeper(nn.Module):
    """A block that sleeps: in its forward, and in each half of its backward."""

    deferrable = ("weight",)

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self._pace = pace

    def forward(self, given: Tensor, past: Past | None = None) -> Tensor:
        output: Tensor = SleepFunction.apply(given, self.weight, self._pace)  # type: ignore[no-untyped-call]
        return output


class SleepFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: nn.Parameter, pace: Pace) -> Tensor:
        length = 0.0 if given.is_meta else float(given.mean())
        ctx.weight, ctx.pace, ctx.length = weight, pace, length if length <= LONGEST else 0.0
        sleep(pace.forward_s * ctx.length)
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        sleep(ctx.pace.input_s * ctx.length)
        product = partial(_weight_gradient, ctx.pace.weight_s * ctx.length)
        waits = defer(ctx.weight, product, (gradient,))
        return gradient.clone(), None if waits else product(gradient), None


def _weight_gradient(seconds: float, gradient: Tensor) -> Tensor:
    sleep(seconds)
    return gradient.new_zeros(1)


def sleep(seconds: float) -> None:
    """Sleep to within a few hundredths of a millisecond; a plain sleep is a tenth late, whatever its length."""
    end = time.perf_counter() + seconds
    time.sleep(max(seconds - 1e-3, 0.0))
    time.sleep(max(end - time.perf_counter() - 1e-4, 0.0))


@contextmanager
def urgently() -> Iterator[None]:
    """Give this thread, and those it starts, real-time priority within a context, if the system allows it."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except (PermissionError, AttributeError):
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
