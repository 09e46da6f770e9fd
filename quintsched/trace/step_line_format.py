"""The line of a step's figures that people read while a job runs.

step 50/200  loss 2.3101  grad norm 1.20  lr 3.0e-04  1,240 samples/s  158,720 tokens/s  MFU 41.2 %  1.21 GB
bubble 11.3 %  left 2:31 min                                                          (one line)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

FIGURES: dict[str, Callable[[float], str]] = {
    "loss": "loss {:.4f}".format,
    "accuracy": "accuracy {:.2%}".format,
    "grad_norm": "grad norm {:.3g}".format,
    "lr": "lr {:.2g}".format,
    "samples_per_s": lambda value: f"{rate(value)} samples/s",
    "tokens_per_s": lambda value: f"{rate(value)} tokens/s",
    "mfu": "MFU {:.1%}".format,
    "memory_gb": "{:.2f} GB".format,
    "bubble": "bubble {:.1%}".format,
    "left_s": lambda value: f"left {in_words(value)}",
}
"""Figures of a step's line in their order, with how each is written."""


def step_line(record: Mapping[str, Any], total_steps: int) -> str:
    """Return the figures of a step's record in one line; a log writes NaN as null."""
    figures = {name: math.nan if record[name] is None else record[name] for name in FIGURES if name in record}
    return "  ".join([f"step {record['step']}/{total_steps}", *(FIGURES[name](figures[name]) for name in figures)])


def rate(value: float) -> str:
    """Return a rate with three figures at least, and thousands marked."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def in_words(seconds: float) -> str:
    """Return a duration as people write it: 4.2 s, 1:05 min, 2:03:00 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"
