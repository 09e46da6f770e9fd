"""Logs of runs, as the trainer writes them: a record in each line."""

import json
from pathlib import Path
from typing import Any

START = {"event": "start", "plan": "1f1b on pp=4, 8 microbatches", "planned_bubble": 0.25, "step": 0}
END = {"event": "end", "step": 40, "seconds": 9.0, "best": 2.5, "bubble": 0.25, "planned_bubble": 0.25}


def step(number: int, **more: Any) -> dict[str, Any]:
    """Return the record of a step, of 40."""
    speed = {"samples_per_s": 8.0, "step_s": 0.5, "bubble": 0.3, "left_s": (40 - number) * 0.5}
    figures = {"loss": 4 - number / 10, "lr": 0.1, "grad_norm": 1.0, "memory_gb": 2.0}
    return {"event": "step", "step": number, "epoch": 1, **speed, **figures, **more}


def write_log(path: Path, *records: object, tail: str = "") -> Path:
    """Write a log and what follows its last whole line; return its path."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return path
