"""Text of strategies, times and bytes, for tables, pictures and logs."""

from __future__ import annotations

import math

from quintsched.errors import counted
from quintsched.strategies.descriptions.strategy import Strategy

OUTERMOST_FIRST = ("dp", "pp", "ep", "cp", "tp")
"""Axes in the order in which meshes are written: innermost last."""

TERMS = {
    "compute": "forward and backward",
    "recompute": "recomputation",
    "tp": "tp communication",
    "cp": "cp communication",
    "ep": "ep communication",
    "pp": "pp communication",
    "dp": "dp communication",
    "bubble": "pipeline bubble",
    "accumulate": "adding up gradients",
    "optimizer": "optimizer step",
    "end": "end of the step",
    "offload": "copies to host memory and back",
    "cores": "waiting for a core",
    "sums": "loss and norm over all ranks",
}
"""Names of time terms; others are shown by their keys."""

HELD = {
    "optimizer": "optimizer state",
    "reserved": "reserved by the driver",
    "activations_ffn": "activations: feed-forward",
    "activations_masks": "activations: masks of dropout",
    "buffers": "message buffers",
    "temporary": "temporary, in backwards",
}
"""Names of memory terms, likewise."""


def strategy_name(strategy: Strategy) -> str:
    """Return a strategy in one line, without default values."""
    parts = [strategy_mesh(strategy), f"microbatch {strategy.microbatch}"]
    if strategy.schedule and (strategy.pp > 1 or (strategy.chunks or 1) > 1):
        chunks = f", {strategy.chunks} chunks" if (strategy.chunks or 1) > 1 else ""
        parts.append(f"{strategy.schedule}{chunks}")
    if strategy.stages:
        parts.append(f"stages {','.join(map(str, strategy.stages))}")
    parts += [recompute_name(strategy)] if strategy.recompute != "none" else []
    parts += [f"at most {strategy.offload:g} microbatches of activations"] if strategy.offload else []
    parts += ["sequence-parallel"] if strategy.sequence_parallel and strategy.tp > 1 else []
    reduces_late = strategy.zero > 1 and strategy.zero_every > 1
    every = f", gradients reduced every {counted(strategy.zero_every, 'microbatch')}" if reduces_late else ""
    parts += [f"ZeRO-{strategy.zero}{every}"] if strategy.zero else []
    hidden = strategy.ep_overlap and strategy.ep > 1 and strategy.schedule == "interleaved-1f1b"
    parts += ["tokens exchanged beside computation"] if hidden else []
    parts += [] if strategy.overlap else ["gradients reduced after all backwards"]
    parts += [f"gradients in {strategy.gradients}"] if strategy.gradients else []
    return "; ".join([*parts, strategy.dtype])


def strategy_mesh(strategy: Strategy) -> str:
    """Return the axes of size > 1: "dp=8,pp=4,tp=2"."""
    axes = {axis: getattr(strategy, axis) for axis in OUTERMOST_FIRST}
    return ",".join(f"{axis}={size}" for axis, size in axes.items() if size > 1) or "one rank"


def recompute_name(strategy: Strategy) -> str:
    """Return the recompute setting as text: "full recomputation", or layers by stage, "2+3x1" for 2, 1, 1, 1."""
    asked = strategy.recompute
    if isinstance(asked, str):
        return f"{asked} recomputation"
    if isinstance(asked, int):
        return f"{counted(asked, 'layer')} recomputed"
    runs: list[list[int]] = []
    for number in asked:
        if runs and runs[-1][0] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return "+".join(f"{count}x{number}" if count > 1 else f"{number}" for number, count in runs) + " layers recomputed"


def duration(seconds: float) -> str:
    """Return a time with four significant digits, in s, ms or µs."""
    if not seconds:
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{digits(seconds / size)} {unit}"
    return f"{digits(seconds * 1e6)} µs"


def gigabytes(held: float) -> str:
    """Return bytes in GB (10^9): two decimals, or more for small values."""
    return f"{held / 1e9:,.2f}" if held >= 1e8 else f"{held / 1e9:.2g}"


def digits(value: float) -> str:
    """Return a number with four significant digits, or all before the point."""
    whole = max(math.floor(math.log10(value)), 0) if value > 0 else 0
    return f"{value:,.{max(3 - whole, 0)}f}"


def term_name(name: str) -> str:
    """Return the name of a term of time."""
    return TERMS.get(name, name.replace("_", " "))


def held_name(name: str) -> str:
    """Return the name of a term of memory."""
    return HELD.get(name, name.replace("activations_", "activations: ", 1).replace("_", " "))
