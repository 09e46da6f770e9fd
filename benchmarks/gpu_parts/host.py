"""Host time for an instruction, with a model so small that the device always waits for the host.

Both loops end each step with one synchronization. The engine's time above the plain loop, divided by the
instructions of its program, is the host's time for one of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from paired import Target, median_interval, report, sample_warm

from .model import PlainLoop, Size, alone, make_engine, synchronize, whole

HOST = Size("host alone", 32, 2, 4, 64, 16, samples=1, microbatches=16, steps=4)
PLAIN, WARM_UP, MOST_US = "plain loop", 5, 20.0


def host(device: torch.device, rounds: int) -> dict[str, Any]:
    """Print and return the microseconds above the plain loop that an instruction takes."""
    batch, plan = HOST.batch(device), HOST.plan("1f1b")
    engine = make_engine(HOST, plan, alone(device))
    rivals = {
        PLAIN: whole(PlainLoop(HOST, device).step, batch, device),
        "quintsched, 1f1b": whole(engine.step, batch, device),
    }
    samples = sample_warm(rivals, rounds, HOST.steps, partial(synchronize, device), WARM_UP)
    instructions = len(plan.programs[0])
    pairs = zip(samples["quintsched, 1f1b"], samples[PLAIN], strict=True)
    above = median_interval([(ours[0] - bare[0]) * 1e6 / HOST.steps / instructions for ours, bare in pairs])
    what = f"µs of the host above the plain loop, each of {instructions} instructions"
    found = report(HOST.title, samples, HOST.steps, PLAIN, [Target(what, above.median, MOST_US)])
    return found | {"us_an_instruction": [above.median, above.low, above.high]}
