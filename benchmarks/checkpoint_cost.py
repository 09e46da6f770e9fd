"""Cost of checkpoints for a run that saves every 100th step, beside the same steps without saving.

    python benchmarks/checkpoint_cost.py                              a GPT on two pipeline ranks, gloo, a process each
    python benchmarks/checkpoint_cost.py --hidden 256 --rounds 12     another width; more rounds, narrower intervals
    python benchmarks/checkpoint_cost.py --dir /mnt/scratch           another disk

In each round the same engines make 100 steps without a save, 100 with one in the background, and 100 with one
that they wait for; the save comes with the first of them. So the copy to the host's memory, the writing thread's
use of the cores, and the fsyncs are all included. Targets: below 2 % where a step takes 50 ms or more. Also
printed: the time that training itself was blocked by a save, the bytes written, and the memory that saving takes.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from paired import Samples, Target, median_s, merge, ratios, report, run_processes, sample
from torch.nn import functional as F

import quintsched as qs
from quintsched.runtime import Engine, connect
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, gpt
from quintsched.runtime.saving.checkpoints.save_and_load_checkpoints import Checkpoints, OpenCheckpoints

RANKS, CLASSES, SEQUENCE, MICROBATCHES = 2, 256, 64, 4
LIMIT, LEAST_STEP_S = 1.02, 0.05
NONE, BACKGROUND, WAITED = "no saves", "in the background", "waited for"


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


class Saving:
    """Steps of an engine, the first of every `every` followed by a save."""

    def __init__(self, step: Callable[[], object], saves: OpenCheckpoints | None, every: int) -> None:
        self._step, self._saves, self._every = step, saves, every
        self._count = 0
        self.stood_s: list[float] = []

    def __call__(self) -> None:
        self._step()
        self._count += 1
        if self._saves is not None and self._count % self._every == 1:
            began = time.perf_counter()
            self._saves.save_step(self._count, {})
            self.stood_s.append(time.perf_counter() - began)


def measure(rank: int, hidden: int, depth: int, samples: int, rounds: int, every: int, folder: str) -> dict[str, Any]:
    """Measure on one rank."""
    plan = qs.compile("1f1b", mesh=qs.Mesh(pp=RANKS), microbatches=MICROBATCHES)
    transport = connect(backend="gloo", timeout_s=120)
    blocks = gpt(DataSpec(input_shape=(SEQUENCE,), num_classes=CLASSES), GPTOptions(hidden=hidden, depth=depth))
    engine = Engine(plan, blocks, loss, lambda p: torch.optim.Adam(p, lr=1e-4), transport=transport)
    ids = torch.randint(CLASSES, (samples, SEQUENCE), generator=torch.Generator().manual_seed(0))
    step = partial(engine.step, ids, ids)
    for _ in range(3):
        step()
    state = sum(tensor.nbytes for tensor in engine.state_dict().values())
    with ExitStack() as stack:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        opened = {
            name: stack.enter_context(Checkpoints(Path(folder) / name, 2, name == BACKGROUND).opened(engine.saves))
            for name in (BACKGROUND, WAITED)
        }
        rivals = {name: Saving(step, opened.get(name), every) for name in (NONE, BACKGROUND, WAITED)}
        found = sample(rivals, rounds, every, engine.everyone.barrier)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stood = {name: statistics.median(rivals[name].stood_s) for name in (BACKGROUND, WAITED)}
    return {"samples": found, "stood_s": stood, "state": state, "grown": (after - before) * 1024}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--samples", type=int, default=16, help="samples per step")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--every", type=int, default=100, help="steps between saves")
    parser.add_argument("--dir", default=None, help="where to save; default: the system's temporary folder")
    parser.add_argument("--json", default=None, metavar="FILE", help="write the figures there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        arguments = (given.hidden, given.depth, given.samples, given.rounds, given.every, folder)
        ranks = run_processes(measure, RANKS, *arguments, timeout_s=3600)
    samples: Samples = merge([rank["samples"] for rank in ranks])
    step_s = median_s(samples, NONE) / given.every
    limit = LIMIT if step_s >= LEAST_STEP_S else float("inf")
    target = Target(
        f"a save every {given.every} steps, in the background", ratios(samples, BACKGROUND, NONE, 0).median, limit
    )
    title = f"GPT of width {given.hidden}, {given.depth} blocks, {RANKS} ranks"
    figures = report(title, samples, given.every, NONE, [target])
    for name in (BACKGROUND, WAITED):
        print(f"  a step stood still {1e3 * max(rank['stood_s'][name] for rank in ranks):.1f} ms for a save {name}")
    state, grown = (max(rank[key] for rank in ranks) / 1e6 for key in ("state", "grown"))
    print(f"  the state of a rank is {state:.1f} MB; its memory grew by {grown:.1f} MB, for two buffers")
    if given.json:
        Path(given.json).write_text(json.dumps(figures | {"state_mb": state, "grown_mb": grown}))
    return int(target.figure > target.limit)


if __name__ == "__main__":
    sys.exit(main())
