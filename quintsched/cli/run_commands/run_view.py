"""View of a run for a terminal: the last figures, the course of the loss, and a bar for each rank.

text_gpt: 1f1b on pp=4, 8 microbatches                step 120/400, left 1:20 min
loss      2.31  ▇▆▅▄▃▂▂▁▁                              the last steps, each a block
bubble    21.3 %, planned 18.8 %
rank   0  ███████████████████░░░░░  78 %  1.21 GB     share of time in which it computes
rank   3  ███████████████████████░  96 %  1.21 GB  1.3 times the median rank
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from quintsched.errors import counted
from quintsched.trace.step_line_format import in_words, rate, step_line

if TYPE_CHECKING:
    from quintsched.trace.training_log import Record, TrainingLog

STRAGGLES = 1.25
"""Times the median of all ranks that a rank computes, from which on it is named: the others wait for it."""
BAR, MOST_BLOCKS, LABEL = 24, 48, 10
"""Letters of a rank's bar, most of a curve, and of what a line begins with."""
_BLOCKS = "▁▂▃▄▅▆▇█"


def line_of(record: Record, planned: float | None) -> str:
    """Return the line of a step's record: its figures, the planned bubble, and who straggles."""
    parts = [step_line(record, _steps(record)), *([f"planned bubble {planned:.1%}"] if planned is not None else [])]
    parts += [f"rank {rank} computes {times:.2f} times the median" for rank, times in stragglers(record).items()]
    return "  ".join(parts)


def stragglers(record: Mapping[str, Any]) -> dict[int, float]:
    """Return the ranks that compute much longer than most, and how many times the median."""
    busy = record.get("rank_busy") or []
    usual = median(busy) if busy else 0.0
    return {rank: share / usual for rank, share in enumerate(busy) if usual and share >= STRAGGLES * usual}


def view_of(log: TrainingLog, summary: Mapping[str, Any], width: int, height: int) -> Iterator[str]:
    """Yield the lines of a view that fits a terminal of this size; the summary is that of the log."""
    steps = [record for record in log.records if record["event"] == "step"]
    yield f"{summary['run']}: {summary['plan']}" if summary["plan"] else str(summary["run"])
    if not steps:
        yield "no step is logged yet"
        return
    last = steps[-1]
    left = f", left {in_words(last['left_s'])}" if summary["ended"] is None and last.get("left_s") else ""
    yield f"step {last['step']}/{_steps(last)}{left}"
    lines = [*_figures(log, summary, min(MOST_BLOCKS, width - 2 * LABEL))]
    yield from lines
    yield from _ranks(last, height - len(lines) - 4)


def _figures(log: TrainingLog, summary: Mapping[str, Any], blocks: int) -> Iterator[str]:
    _, losses = log.series("loss")
    loss = "not finite" if summary.get("loss") is None else f"{summary['loss']:.4f}"
    best = f"  best validation {summary['best_validation_loss']:.4f}" if "best_validation_loss" in summary else ""
    yield f"{'loss':{LABEL}}{loss}  {curve(losses, blocks)}{best}"
    speed = [f"{rate(summary[name])} {name[: -len('_per_s')]}/s" for name in _RATES if name in summary]
    speed += [f"MFU {summary['mfu']:.1%}"] if "mfu" in summary else []
    yield f"{'speed':{LABEL}}{', '.join(speed)}"
    if "bubble" in summary:
        planned = f", planned {summary['planned_bubble']:.1%}" if "planned_bubble" in summary else ""
        yield f"{'bubble':{LABEL}}{summary['bubble']:.1%}{planned}"


_RATES = ("samples_per_s", "tokens_per_s")


def _ranks(record: Mapping[str, Any], room: int) -> Iterator[str]:
    """Yield a line per rank, or, where there is no room for all, for those that compute most."""
    busy, memory = record.get("rank_busy") or [], record.get("rank_memory_gb") or []
    shown = range(len(busy))
    if len(busy) > max(room, 1):
        shown = sorted(sorted(shown, key=lambda rank: -busy[rank])[: max(room - 1, 1)])  # type: ignore[assignment]
        yield f"the {len(shown)} of {counted(len(busy), 'rank')} that compute most:"
    late = stragglers(record)
    for rank in shown:
        full = min(round(BAR * busy[rank]), BAR)
        held = f"  {memory[rank]:.2f} GB" if rank < len(memory) else ""
        more = f"  {late[rank]:.2f} times the median rank" if rank in late else ""
        label = f"rank {rank:>3}"
        yield f"{label:{LABEL}}{'█' * full}{'░' * (BAR - full)} {busy[rank]:>4.0%}{held}{more}"


def curve(values: Sequence[float], blocks: int) -> str:
    """Return values as a row of blocks from low to high, each the mean of as many values."""
    found = [value for value in values if math.isfinite(value)]
    size = max(math.ceil(len(found) / max(blocks, 1)), 1)
    means = [sum(found[at : at + size]) / len(found[at : at + size]) for at in range(0, len(found), size)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)


def _steps(record: Mapping[str, Any]) -> int:
    """Return the steps of the whole training, from what is left of it."""
    left = (record.get("left_s") or 0.0) / record["step_s"] if record.get("step_s") else 0.0
    return int(record["step"]) + round(left)
