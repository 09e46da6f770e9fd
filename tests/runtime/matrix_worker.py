"""One rank of a world of processes that trains one case of the matrix after the other, over gloo.

Each case has a transport, and so groups, of its own, which end with it; the world is one. What the ranks end with
lies in FOLDER, a file per rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from quintsched.runtime.comm import Rules, connect

from .matrix import CASES, Case
from .toys import train_rank


def train(rules: Rules, case: Case) -> dict[str, object]:
    transport = connect("gloo", timeout_s=60, rules=rules)
    task = case.task(torch.float64)
    found = train_rank(transport, case.plan, task, case.blocks, dtype=torch.float64, tied=case.tied)
    transport.close()
    return {"losses": found.losses, "weights": found.weights}


def main(folder: Path, runs: list[str]) -> None:
    cases, found = {str(case): case for case in CASES}, {}
    dist.init_process_group("gloo")
    for run in runs:
        rules, _, name = run.partition("/")
        try:
            found[run] = train(cast(Rules, rules), cases[name])
        except Exception as error:
            error.add_note(f"in {run}")
            raise
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()
