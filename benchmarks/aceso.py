"""Predictions from an operator profile, beside Aceso's own, for measured runs of GPTs on L4 GPUs.

    python benchmarks/aceso.py                                       the published runs
    python benchmarks/aceso.py --runs R.json --profiles P.json       others in the same form; P may be a folder of CSVs
    python benchmarks/aceso.py --stages                              forward and backward of each measured rank too

Runs and profiles are Aceso's (Liu et al., EuroSys '24), as published with Mist (source: see `data/aceso_l4.json`):
stages of uneven numbers of operators, recomputation per operator, 1F1B, two and four nodes. Nothing is fitted: the
predictions use the profile and the rules of Aceso's code. Memory is PyTorch's `max_allocated`, of each measured rank.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from quintsched.strategies.profiles.aceso import read_layout
from quintsched.strategies.profiles.profile import Profile
from quintsched.strategies.profiles.read_profile import read_profile
from quintsched.strategies.profiles.step_from_profile import Composed, compose

DATA = Path(__file__).parent / "data"
MIB = 2**20
TIME_LIMIT, MEMORY_LIMIT = 0.06, 0.04
"""Mean absolute errors beyond which the exit code is 1."""


@dataclass(frozen=True)
class Run:
    """One measured run, with its prediction."""

    row: dict[str, Any]
    composed: Composed

    @property
    def time_error(self) -> float:
        """Relative error of the step time; positive: predicted slower than measured."""
        return self.composed.step_s * 1e3 / float(self.row["measured_step_ms"]) - 1

    @property
    def aceso_time_error(self) -> float:
        """Relative error of Aceso's own prediction."""
        return float(self.row["aceso_predicted"]["step_ms"]) / float(self.row["measured_step_ms"]) - 1

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """Measurements of each rank."""
        return list(self.row["measured_by_rank"].values())

    @property
    def memory_errors(self) -> list[float]:
        """Relative memory error of each measured rank."""
        peaks = [self.composed.memory[rank["stage"]].peak / MIB for rank in self.ranks]
        return [peak / rank["max_allocated"] - 1 for peak, rank in zip(peaks, self.ranks, strict=True)]

    @property
    def aceso_memory_errors(self) -> list[float]:
        """Relative memory errors of Aceso's prediction, without its reserve for the allocator."""
        predicted = self.row["aceso_predicted"]["stage_mem_normal_mb"]
        return [predicted[rank["stage"]] / rank["max_allocated"] - 1 for rank in self.ranks]


def predicted_runs(runs: Path, profiles: Path | None = None) -> list[Run]:
    """Return the runs of a file, predicted from a file or folder of profiles, by default those beside it."""

    @cache
    def profile_of(size: str) -> Profile:
        return read_profile(profiles or DATA / f"aceso_l4_{size.lower()}.json", size=size)

    rows = json.loads(runs.read_text(encoding="utf-8"))["rows"]
    return [Run(row, compose(profile_of(row["model"]), read_layout(row["config"]))) for row in rows]


def mean_error(errors: list[float]) -> float:
    """Return the mean absolute error."""
    return fmean(map(abs, errors))


def main() -> int:
    """Print the table; return 1 where a mean error is beyond its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=DATA / "aceso_l4.json")
    parser.add_argument("--profiles", type=Path, default=None)
    parser.add_argument("--stages", action="store_true")
    arguments = parser.parse_args()
    found = predicted_runs(arguments.runs, arguments.profiles)
    print(f"{'run':<44}{'measured':>10}{'predicted':>10}{'error':>8}{'Aceso':>8}   memory: error   Aceso")
    for run in found:
        memory, aceso = mean_error(run.memory_errors), mean_error(run.aceso_memory_errors)
        print(
            f"{run.row['run']:<44}{run.row['measured_step_ms'] / 1e3:>8.2f} s{run.composed.step_s:>8.2f} s"
            f"{run.time_error:>+8.1%}{run.aceso_time_error:>+8.1%}{memory:>16.1%}{aceso:>8.1%}"
        )
        if arguments.stages:
            _print_stages(run)
    time, memory = (mean_error(errors) for errors in (_times(found), _memories(found)))
    aceso_time = mean_error([run.aceso_time_error for run in found])
    aceso_memory = mean_error([error for run in found for error in run.aceso_memory_errors])
    print(f"{'mean absolute error':<64}{time:>8.1%}{aceso_time:>8.1%}{memory:>16.1%}{aceso_memory:>8.1%}")
    return int(time > TIME_LIMIT or memory > MEMORY_LIMIT)


def _times(found: list[Run]) -> list[float]:
    return [run.time_error for run in found]


def _memories(found: list[Run]) -> list[float]:
    return [error for run in found for error in run.memory_errors]


def _print_stages(run: Run) -> None:
    microbatches = run.composed.microbatches
    for rank, error in zip(run.ranks, run.memory_errors, strict=True):
        stage = run.composed.stages[rank["stage"]]
        forward, backward = (rank[f"{way}-compute"] / microbatches for way in ("forward", "backward"))
        print(
            f"    stage {rank['stage']:<3} forward {stage.forward_s * 1e3:6.1f} ms ({forward:6.1f} measured)"
            f"  backward {stage.backward_s * 1e3:6.1f} ms ({backward:6.1f})  memory {error:+.1%}"
        )


if __name__ == "__main__":
    sys.exit(main())
