"""Gain of `quintsched run --autotune` beside that of the best partition: blocks that sleep, on two and four ranks.

    python benchmarks/autotune.py [--rounds 3] [--ranks 2] [--json]

    slow   one rank takes 1.5 times as long for every block
    head   the last block takes three times as long as another

Each run begins with as many blocks in every stage. The best partition is the one whose plan is the fastest of all in
simulations with the true times; it is measured too, and the even one a second time (A/A). Runs take turns. As nothing
makes a sleep shorter, the fastest step of each counts, and the fastest round. Limits: a gain of at least 80 % of that
of the best partition, a step within 5 % of what was predicted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import quintsched as qs
from quintsched.trace.measured_trace import Trace

FORWARD_S = 0.006
"""Sleep of a block's forward; each half of its backward sleeps as long."""
MICROBATCHES, STEPS = 8, 24
LEAST_SHARE, MOST_ERROR = 0.8, 0.05
CASES = {"slow": (1.5, 1.0), "head": (1.0, 3.0)}
"""Factors of the times of rank 1, and of the last block."""
SIZES = {2: 8, 4: 16}
"""Blocks, by ranks."""

BLOCKS = """
import os, sys
import numpy as np
sys.path.insert(0, {folder!r})
from sleeper import Pace, Sleeper
from quintsched.runtime.data import Dataset, Split

def build(blocks, second, rank_factor, last_factor):
    own = rank_factor if os.environ.get("RANK") == "1" else 1.0
    paces = [second * own * (last_factor if k == blocks - 1 else 1.0) for k in range(blocks)]
    return [Sleeper(Pace(s, s, s)) for s in paces]

def load(steps, batch):
    part = lambda n: Split(inputs=np.ones((n, 4), np.float32), targets=np.zeros(n, np.int64))
    return Dataset(name="ones", train=part(steps * batch), validation=part(batch), num_classes=4)
"""


def job(folder: Path, ranks: int, case: str, stages: Sequence[int]) -> Path:
    """Write a job, and return its path."""
    rank_factor, last_factor = CASES[case]
    (folder / "blocks.py").write_text(BLOCKS.format(folder=str(Path(__file__).parent)))
    options = {"blocks": sum(stages), "second": FORWARD_S, "rank_factor": rank_factor, "last_factor": last_factor}
    sections = {
        "model": {"name": "blocks.py:build", "options": options},
        "data": {"name": "blocks.py:load", "options": {"steps": STEPS, "batch": MICROBATCHES}},
        "parallel": {
            "mesh": f"pp={ranks}",
            "schedule": "1f1b",
            "microbatches": MICROBATCHES,
            "stages": list(stages),
        },
        "train": {"epochs": 1, "batch_size": MICROBATCHES, "optimizer": {"name": "sgd", "lr": 0.0}},
        "runtime": {"transport": "gloo"},
        "checkpoint": {"dir": "saved"},
        "log": {"every": STEPS},
    }
    (folder / "job.yaml").write_text(json.dumps(sections))
    return folder / "job.yaml"


def run(folder: Path, *arguments: str) -> str:
    """Run a job in its folder, and return what it prints."""
    command = [sys.executable, "-m", "quintsched", "run", "job.yaml", *arguments]
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def fastest_ms(folder: Path, plan: qs.Plan) -> float:
    """Return the fastest step of a trace."""
    trace = Trace.load(folder, plan)
    return 1e3 * min(trace.makespan(step) for step in trace.steps)


def measured(ranks: int, case: str, stages: Sequence[int]) -> float:
    """Return the step of a run with these stages, in ms."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        job(folder, ranks, case, stages)
        run(folder, "--trace", "traces")
        return fastest_ms(folder / "traces", qs.Plan.load(folder / "saved" / "plan.json"))


def tuned(ranks: int, case: str, stages: Sequence[int]) -> tuple[float, float, float]:
    """Return the step before, as predicted, and after the change, in ms; the prediction is for the fastest step too."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        job(folder, ranks, case, stages)
        said = run(folder, "--autotune")
        even = qs.compile("1f1b", mesh=f"pp={ranks}", microbatches=MICROBATCHES, stages=stages)
        before = fastest_ms(folder / "saved-autotune" / "before", even)
        found = re.search(r"predicted ([-+][\d.]+)%", said)
        if found is None or "kept" not in said:
            return before, before, before
        plan = qs.Plan.load(folder / "saved" / "plan.json")
        after = fastest_ms(folder / "saved-autotune" / "after", plan)
        return before, before * (1 + float(found[1]) / 100), after


def best_partition(ranks: int, case: str, blocks: int) -> tuple[int, ...]:
    """Return the stages whose plan is the fastest in a simulation with the true times."""
    rank_factor, last_factor = CASES[case]
    each = [FORWARD_S * (last_factor if k == blocks - 1 else 1.0) for k in range(blocks)]
    plan, found = qs.compile("1f1b", mesh=f"pp={ranks}", microbatches=MICROBATCHES), []
    for cuts in combinations(range(1, blocks), ranks - 1):
        ends = (0, *cuts, blocks)
        times = tuple(sum(each[ends[k] : ends[k + 1]]) * (rank_factor if k == 1 else 1.0) for k in range(ranks))
        costs = qs.Costs(unit="s", forward=times, backward_input=times, backward_weight=times)
        found.append((plan.simulate(costs).makespan, tuple(ends[k + 1] - ends[k] for k in range(ranks))))
    return min(found)[1]


def results(rounds: int, sizes: dict[int, int]) -> Iterator[dict[str, Any]]:
    """Yield the figures of each case."""
    for ranks, blocks in sizes.items():
        even = (blocks // ranks,) * ranks
        for case in CASES:
            best = best_partition(ranks, case, blocks)
            rows = [
                (*tuned(ranks, case, even), measured(ranks, case, even), measured(ranks, case, best))
                for _ in range(rounds)
            ]
            before, predicted, after, again, limit = (min(column) for column in zip(*rows, strict=True))
            yield {
                "ranks": ranks,
                "case": case,
                "best_stages": best,
                "even_ms": before,
                "even_again_ms": again,
                "predicted_ms": predicted,
                "tuned_ms": after,
                "best_ms": limit,
                "share_of_gain": (before - after) / (before - limit),
                "error": predicted / after - 1,
            }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ranks", type=int, choices=SIZES, help="only so many ranks")
    asked = parser.parse_args()
    sizes = {ranks: blocks for ranks, blocks in SIZES.items() if asked.ranks in (None, ranks)}
    failed = 0
    for row in results(asked.rounds, sizes):
        failed += row["share_of_gain"] < LEAST_SHARE or abs(row["error"]) > MOST_ERROR
        if asked.json:
            print(json.dumps(row))
            continue
        print(
            "{ranks} ranks, {case}: even {even_ms:.1f} ms (again {even_again_ms:.1f}), predicted {predicted_ms:.1f}, "
            "tuned {tuned_ms:.1f}, best {best_ms:.1f}: {share_of_gain:.0%} of the gain, prediction off by "
            "{error:+.1%}".format(**row)
        )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
