"""Time of a split backward's halves, and the cost of a trace, on one process and a small GPT.

    python benchmarks/halves.py [--rounds 40] [--json]

    Bwd        the whole backward, in a plan that has no halves
    BwdInput   computes the input's gradient, in a zero-bubble plan of the same microbatches
    BwdWeight  the deferred weight gradients

Times are those of a trace. The trace's own cost is a paired ratio (see paired.py): the same steps with and without.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from paired import Target, ratios, report, sample_warm

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, gpt
from quintsched.runtime.train.built_in_losses import cross_entropy_sum
from quintsched.trace.measured_trace import Trace

SEQUENCE, WORDS, SAMPLES, MICROBATCHES = 128, 256, 16, 4
PLAIN, AGAIN, TRACED = "not traced", "not traced again", "traced"
FOREVER = range(2, 10**6)


def engine_of(schedule: str, traced: range | None = None) -> Engine:
    """Return a GPT of 4 layers, d=256, on one rank."""
    plan = qs.compile(schedule, mesh="pp=1", microbatches=MICROBATCHES)
    spec = DataSpec(input_shape=(SEQUENCE,), num_classes=WORDS)
    blocks = gpt(spec, GPTOptions(hidden=256, depth=4, heads=4))
    optimizer = partial(torch.optim.SGD, lr=0.01)
    return Engine(plan, blocks, cross_entropy_sum, optimizer, dtype=torch.float32, trace_steps=traced)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random token ids and targets."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, WORDS, (2, SAMPLES, SEQUENCE), generator=random)
    return ids[0], ids[1]


def halves(steps: int = 10) -> dict[str, Any]:
    """Return milliseconds per microbatch of a whole backward and of its halves, and the deferrable share."""
    costs = {}
    for schedule in ("1f1b", "zb-h1"):
        engine = engine_of(schedule, range(2, 2 + steps))
        for _ in range(2 + steps):
            engine.step(*batch())
        with TemporaryDirectory() as folder:
            engine.save_trace(folder)
            costs[schedule] = Trace.load(Path(folder), engine.plan).costs("ms")
        share = engine.deferred_share
    whole = sum(getattr(costs["1f1b"], name)[0] for name in ("backward_input", "backward_weight"))
    split = [getattr(costs["zb-h1"], name)[0] for name in ("backward_input", "backward_weight")]
    print(f"\nbackward of a microbatch, ms: whole {whole:.2f}, input half {split[0]:.2f}, weight half {split[1]:.2f}")
    print(
        f"  halves against the whole: {sum(split) / whole:.3f}; moved to the weight half: {split[1] / sum(split):.1%}"
    )
    print(f"  weights whose gradients can wait: {share or 0:.1%}", flush=True)
    return {"whole_ms": whole, "input_ms": split[0], "weight_ms": split[1], "deferred_share": share}


def tracing(rounds: int) -> dict[str, Any]:
    """Return the cost of a trace, in rounds of one step each."""
    rivals = {
        name: partial(engine_of("1f1b", traced).step, *batch())
        for name, traced in ((PLAIN, None), (AGAIN, None), (TRACED, FOREVER))
    }
    samples = sample_warm(rivals, rounds, 1, lambda: None, 3)
    target = Target("time with a trace", ratios(samples, TRACED, PLAIN, 0).median, 1.02)
    return report("a step, traced and not", samples, 1, PLAIN, [target])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="rounds of the comparison, at least 6 (default 40)")
    parser.add_argument(
        "--json", action="store_true", help="figures as JSON to standard output, tables to standard error"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with redirect_stdout(sys.stderr if chosen.json else sys.stdout):
        found = {"halves": halves(), "tracing": tracing(chosen.rounds)}
    if chosen.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
