"""The line of a step's figures that people read while a job runs.

step 50/200  loss 2.3101  grad norm 1.20  lr 3.0e-04  1,240 samples/s  158,720 tokens/s  MFU 41.2 %  1.21 GB
bubble 11.3 %  left 2:31 min                                                          (one line)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def step_line(record: Mapping[str, Any], total_steps: int) -> str:
    """Return the figures of a step's record in one line."""
    parts = [f"step {record['step']}/{total_steps}", f"loss {record['loss']:.4f}"]
    if "accuracy" in record:
        parts.append(f"accuracy {record['accuracy']:.2%}")
    parts += [f"grad norm {record['grad_norm']:.3g}", f"lr {record['lr']:.2g}"]
    parts.append(f"{rate(record['samples_per_s'])} samples/s")
    if "tokens_per_s" in record:
        parts.append(f"{rate(record['tokens_per_s'])} tokens/s")
    if "mfu" in record:
        parts.append(f"MFU {record['mfu']:.1%}")
    if record.get("memory_gb"):
        parts.append(f"{record['memory_gb']:.2f} GB")
    return "  ".join([*parts, f"bubble {record['bubble']:.1%}", f"left {in_words(record['left_s'])}"])


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
