"""Certificate of a search: all that it left out, with reasons that are verified without searching again.

    {"model": …, "hardware": …, "gpus": 1024, "batch": 1536, "seq": 2048, "choices": …, "top": 5, "strategies": 518960,
     "best":      [{"place": [611, 7], "numbers": [], "step_s": 17.8, "memory_bytes": 5.4e10}, …],
     "pruned":    [{"box": [16, 8, 1, 1, 8], "reason": "time", "bound": 21.3},                    a mesh: pp tp cp ep dp
                   {"box": [16, 4, 1, 1, 16, 0, 1, 8], "reason": "memory", "bound": 9.1e10}, …],  a frame of one
     "evaluated": [[16, 4, 1, 1, 16, 0, 1, 1], …],                                                frames, leaf by leaf
     "per_stage": [{"place": [611, 3], "least": [2, 1, 0, 0]}, …]}

A box is pruned if no strategy in it can be as fast as the k-th best, or none can fit. Boxes and evaluated frames cover
the space exactly once. In an evaluated frame, leaves of per-stage recomputation are either no faster than the k-th best
even without recomputation, or in `per_stage_recompute`: fewer recomputed layers than that do not fit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from quintsched.files.atomic import write_whole
from quintsched.files.user_records import FormatVersion, read_record
from quintsched.ir.instruction_columns import Ints
from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.model import Description, Model, Size
from quintsched.strategies.tuning.axis_choices import Choices
from quintsched.strategies.tuning.evaluator import Evaluator
from quintsched.strategies.tuning.fastest_strategies_so_far import Candidates
from quintsched.strategies.tuning.strategy_bounds import Bounds, frame_bounds, mesh_bounds
from quintsched.strategies.tuning.strategy_space import MESH
from quintsched.strategies.tuning.tune import Tuning

MOST_CERTIFICATE_BYTES = 2**28


class LeftOut(Description):
    """Mesh or frame that was left out."""

    box: tuple[int, ...]
    """Columns of the box: those of `space.MESH` or of `space.FRAME`."""
    reason: Literal["time", "memory"]
    bound: float
    """Lower bound of the box, in seconds or bytes."""


class Winner(Description):
    """One of the best strategies."""

    place: tuple[int, int]
    numbers: tuple[int, ...] = ()
    """Layers that the stages of each rank recompute, if the leaf is "per-stage"."""
    step_s: float
    memory_bytes: float


class Least(Description):
    """Solution for a leaf of per-stage recomputation."""

    place: tuple[int, int]
    least: tuple[int, ...]
    """Least number of recomputed layers with which each rank fits; one more than it has, if none does."""


class SearchCertificate(Description):
    """Certificate; see the module."""

    format: Literal["quintsched-tuning"] = "quintsched-tuning"
    version: FormatVersion = 1
    model: Model
    hardware: Hardware
    gpus: Size
    batch: Size
    seq: Size
    choices: Choices
    top: int = Field(ge=1)
    strategies: int
    best: tuple[Winner, ...]
    pruned: tuple[LeftOut, ...]
    evaluated: tuple[tuple[int, ...], ...]
    per_stage: tuple[Least, ...]

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        write_whole(Path(path), self.model_dump_json(exclude_defaults=True), "the certificate")


def load_certificate(path: str | Path) -> SearchCertificate:
    """Read a certificate; raises `UsageError` if it cannot be opened, `InputError` with the fault and its place."""
    return read_record(SearchCertificate, Path(path), MOST_CERTIFICATE_BYTES, "the certificate")


def make_certificate(tuning: Tuning) -> SearchCertificate:
    """Return the certificate of a search."""
    space, found = tuning.space, tuning.found
    return SearchCertificate(
        model=tuning.model,
        hardware=tuning.hardware,
        gpus=space.gpus,
        batch=space.batch,
        seq=space.seq,
        choices=space.choices,
        top=found.ranking.top,
        strategies=tuning.strategies,
        best=_winners(found.ranking.best),
        pruned=tuple(_pruned(tuning)),
        evaluated=tuple(map(tuple, space.frames[found.evaluated].tolist())),
        per_stage=tuple(
            Least(place=tuple(place), least=tuple(least))
            for places, numbers in found.solved
            for place, least in zip(places.tolist(), numbers.tolist(), strict=True)
        ),
    )


def _winners(best: Candidates) -> tuple[Winner, ...]:
    return tuple(
        Winner(
            place=tuple(best.place[row].tolist()),
            numbers=(best.numbers[row] if best.numbers else None) or (),
            step_s=float(best.time_s[row]),
            memory_bytes=float(best.memory_bytes[row]),
        )
        for row in range(len(best))
    )


def _pruned(tuning: Tuning) -> list[LeftOut]:
    """Return a box for each mesh that can be left out as a whole, and for each such frame of the others."""
    space, found = tuning.space, tuning.found
    if not found.pruned:
        return []
    bounds = frame_bounds(space, Evaluator(space, tuning.hardware), np.arange(space.num_frames))
    limit, capacity = found.ranking.limit_s, tuning.hardware.memory_gb * 1e9
    meshes = mesh_bounds(space, bounds)
    slow, large = meshes.time_s > limit, meshes.memory_bytes > capacity
    kept = np.zeros(space.num_frames, bool)
    kept[found.evaluated] = True
    used = np.logical_or.reduceat(kept, space.starts[:-1])
    whole = (slow | large) & ~used
    boxes = _boxes(space.frames[space.starts[:-1], : len(MESH)], meshes, large, np.flatnonzero(whole))
    in_whole = np.repeat(whole, np.diff(space.starts))
    rest = np.flatnonzero(~kept & ~in_whole)
    return boxes + _boxes(space.frames, bounds, bounds.memory_bytes > capacity, rest)


def _boxes(columns: Ints, bounds: Bounds, large: np.ndarray, chosen: Ints) -> list[LeftOut]:
    return [
        LeftOut(
            box=tuple(columns[row].tolist()),
            reason="memory" if large[row] else "time",
            bound=float(bounds.memory_bytes[row] if large[row] else bounds.time_s[row]),
        )
        for row in chosen.tolist()
    ]
