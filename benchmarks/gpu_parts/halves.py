"""Cost of a split backward beside a whole one, on one rank, and the share of weights with deferrable gradients."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from paired import Interval, Target, median_interval

from quintsched.trace.measured_trace import Trace

from .model import MEDIUM, Size, alone, make_engine, sized

WARM_UP, LEAST_SHARE, MOST = 3, 0.99, 1.03


def halves(device: torch.device, rounds: int) -> dict[str, Any]:
    """Print and return the time of both halves of a backward against the whole, step by step, from traces."""
    size = sized(MEDIUM, device)
    (whole_ms, _), (halves_ms, share) = (backward_ms(size, schedule, device, rounds) for schedule in ("1f1b", "zb-h1"))
    ratio = median_interval([both / one for both, one in zip(halves_ms, whole_ms, strict=True)])
    whole = median_interval(whole_ms)
    print(
        f"\nbackwards of a step, {size.title}, {size.microbatches} of them: whole {whole.median:.3f} ms, halves {ratio}"
    )
    print(Target("both halves against the whole", ratio.median, MOST))
    print(Target("weights whose gradients cannot wait", 1 - share, round(1 - LEAST_SHARE, 3)), flush=True)
    return {"whole_ms": _plain(whole), "ratio": _plain(ratio), "deferred_share": share}


def backward_ms(size: Size, schedule: str, device: torch.device, steps: int) -> tuple[list[float], float]:
    """Return the total time of each step's backwards, in milliseconds, and the share that can be deferred."""
    plan = size.plan(schedule)
    engine, batch = make_engine(size, plan, alone(device), range(WARM_UP, WARM_UP + steps)), size.batch(device)
    for _ in range(WARM_UP + steps):
        engine.step(*batch)
    with TemporaryDirectory() as folder:
        engine.save_trace(folder)
        trace = Trace.load(Path(folder), plan)
    found = []
    for number in trace.steps:
        spans = [span for row in trace.step(number).timeline for span in row]
        found.append(sum(span.end - span.start for span in spans if span.instruction.op.startswith("Bwd")))
    return found, engine.deferred_share or 0.0


def _plain(interval: Interval) -> list[float]:
    return [interval.median, interval.low, interval.high]
