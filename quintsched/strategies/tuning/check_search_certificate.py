"""Checker of a certificate of `tune`, without a search: it counts, evaluates and compares.

    boxes and evaluated frames     every frame of the space is in exactly one of them
    each pruned box                its bound equals that of `strategy_bounds`, and exceeds the k-th best or the memory
    each evaluated frame           all its leaves are evaluated; the best k are those of the certificate
    per-stage recomputation        the time of such a leaf without any recomputation exceeds the k-th best; or less
                                   than `least` does not fit, and `least` is slower or among the best

It trusts the prediction, the space, and `strategy_bounds`, but not the search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np

from quintsched.errors import UnsoundError
from quintsched.ir.instruction_columns import Ints
from quintsched.strategies.prediction.vectorized_prediction import Evaluated
from quintsched.strategies.tuning.evaluator import Evaluator
from quintsched.strategies.tuning.per_stage_recompute import is_new
from quintsched.strategies.tuning.search_certificate import LeftOut, SearchCertificate, Winner
from quintsched.strategies.tuning.strategy_bounds import BOUND_MARGIN, frame_bounds, mesh_bounds
from quintsched.strategies.tuning.strategy_space import MESH, PER_STAGE, Mask, Space, make_space

Places = Mapping[tuple[int, ...], int]
"""Number of a frame, or a mesh, by its columns."""
FRAMES_AT_ONCE = 1 << 12
CERTIFICATE_TOLERANCE = 1e-9
"""Relative tolerance of a certificate's figures, for rounding."""


def check_certificate(given: SearchCertificate) -> int:
    """Return the number of strategies that the certificate covers; raises `UnsoundError` for the first fault."""
    space = make_space(given.model, given.gpus, given.batch, given.seq, given.choices)
    evaluator = Evaluator(space, given.hardware)
    if space.count() != given.strategies:
        _refuse(f"it counts {given.strategies} strategies, but the space holds {space.count()}")
    limit = given.best[-1].step_s if len(given.best) == given.top else float("inf")
    frames = {tuple(row): frame for frame, row in enumerate(space.frames.tolist())}
    firsts = space.frames[space.starts[:-1], : len(MESH)].tolist()
    meshes = {tuple(row): mesh for mesh, row in enumerate(firsts)}
    evaluated = _check_cover(space, given, frames, meshes)
    _check_bounds(space, evaluator, given.pruned, limit, frames, meshes)
    found = _leaves(space, evaluator, evaluated, given, limit)
    _check_best(given.best, sorted(found)[: given.top])
    return space.count()


def _check_cover(space: Space, given: SearchCertificate, frames: Places, meshes: Places) -> Ints:
    """Return the evaluated frames; checks that every frame of the space is covered exactly once."""
    times = np.zeros(space.num_frames, np.int64)
    for entry in given.pruned:
        if entry.box in meshes:
            mesh = meshes[entry.box]
            times[space.starts[mesh] : space.starts[mesh + 1]] += 1
        elif entry.box in frames:
            times[frames[entry.box]] += 1
        else:
            _refuse(f"the space has no box {list(entry.box)}")
    unknown = next((row for row in given.evaluated if row not in frames), None)
    if unknown is not None:
        _refuse(f"the space has no frame {list(unknown)}")
    evaluated = np.array([frames[row] for row in given.evaluated], np.int64)
    np.add.at(times, evaluated, 1)
    if np.any(times != 1):
        frame = int(np.flatnonzero(times != 1)[0])
        _refuse(f"the frame {space.frames[frame].tolist()} is accounted for {times[frame]} times instead of once")
    return evaluated


def _check_bounds(
    space: Space, evaluator: Evaluator, boxes: Sequence[LeftOut], limit: float, frames: Places, meshes: Places
) -> None:
    """Check that every bound is right, and large enough to exclude its box."""
    if not boxes:
        return
    of_frames = frame_bounds(space, evaluator, np.arange(space.num_frames))
    of_meshes = mesh_bounds(space, of_frames)
    for entry in boxes:
        is_mesh = entry.box in meshes
        bounds, at = (of_meshes, meshes[entry.box]) if is_mesh else (of_frames, frames[entry.box])
        by_time = entry.reason == "time"
        true = float((bounds.time_s if by_time else bounds.memory_bytes)[at])
        if not _near(entry.bound, true):
            _refuse(f"the box {list(entry.box)} has the bound {true!r} in {entry.reason}, not {entry.bound!r}")
        if true <= (limit if by_time else evaluator.capacity_bytes):
            _refuse(f"the box {list(entry.box)} may hold one of the best: its {entry.reason} may be {true!r}")


RankingKey = tuple[float, float, int, int, tuple[int, ...]]
"""Time, memory, place and numbers of a strategy; the sort key of the ranking."""


def _leaves(
    space: Space, evaluator: Evaluator, frames: Ints, given: SearchCertificate, limit: float
) -> list[RankingKey]:
    """Evaluate every leaf of the frames; return those that fit and are no slower than the limit."""
    solved = {entry.place: entry.least for entry in given.per_stage}
    found: list[RankingKey] = []
    for start in range(0, len(frames), FRAMES_AT_ONCE):
        columns, place = space.expand(frames[start : start + FRAMES_AT_ONCE])
        outcome = evaluator.evaluate(columns)
        by_stage = columns["recompute"] == PER_STAGE
        fits = (outcome.memory_bytes <= evaluator.capacity_bytes) & ~by_stage
        found += _keys(space, evaluator, outcome, place, fits, limit)
        open_leaves = by_stage & space.recomputes_by_stage(place[:, 0]) & (outcome.step_s * (1 - BOUND_MARGIN) <= limit)
        found += _per_stage(space, evaluator, place[open_leaves], solved, limit)
    return found


def _per_stage(
    space: Space, evaluator: Evaluator, place: Ints, solved: dict[tuple[int, int], tuple[int, ...]], limit: float
) -> list[RankingKey]:
    """Return the least tuples of these leaves that are no slower than the limit; checks that less does not fit."""
    by_ranks: dict[int, list[tuple[int, int]]] = {}
    for frame, leaf in place.tolist():
        if (frame, leaf) not in solved:
            _refuse(f"the leaf {[frame, leaf]} may be among the best, and it has no bounds of its tuples")
        pp = int(space.frames[frame, 0])
        if len(solved[frame, leaf]) != pp:
            _refuse(f"the leaf {[frame, leaf]} has {pp} pipeline ranks, but numbers for {len(solved[frame, leaf])}")
        if not all(0 <= number <= space.model.layers + 1 for number in solved[frame, leaf]):
            _refuse(f"the leaf {[frame, leaf]} has numbers beyond the {space.model.layers} layers")
        by_ranks.setdefault(pp, []).append((frame, leaf))
    found: list[RankingKey] = []
    for leaves in by_ranks.values():
        least, places = np.array([solved[leaf] for leaf in leaves], np.int64), np.array(leaves, np.int64)
        _check_least(space, evaluator, places, least)
        rows = np.flatnonzero(is_new(space, places[:, 0], least))
        if not len(rows):
            continue
        outcome = evaluator.evaluate(space.rows(places[rows]), least[rows])
        fits = outcome.memory_bytes <= evaluator.capacity_bytes
        found += _keys(space, evaluator, outcome, places[rows], fits, limit, least[rows])
    return found


def _check_least(space: Space, evaluator: Evaluator, place: Ints, least: Ints) -> None:
    """Check that no rank fits with fewer layers than its least number."""
    columns = space.rows(place)
    for number in range(int(least.max(initial=0))):
        held = evaluator.rank_bytes({**columns, "recompute": np.full(len(place), number, np.int64)})
        wrong = (number < least) & (held <= evaluator.capacity_bytes)
        if np.any(wrong):
            row, rank = np.argwhere(wrong)[0].tolist()
            _refuse(f"rank {rank} of the leaf {place[row].tolist()} fits with {number} layers, fewer than said")


def _check_best(best: Sequence[Winner], found: Sequence[RankingKey]) -> None:
    if len(best) != len(found):
        _refuse(f"it names {len(best)} best strategies, but there are {len(found)}")
    for rank, (winner, (time, memory, frame, leaf, numbers)) in enumerate(zip(best, found, strict=True), 1):
        same = winner.place == (frame, leaf) and winner.numbers == numbers
        if not (same and _near(winner.step_s, time) and _near(winner.memory_bytes, memory)):
            _refuse(f"number {rank} of the best is the leaf {[frame, leaf]} with {time!r} s, not {list(winner.place)}")


def _keys(
    space: Space,
    evaluator: Evaluator,
    outcome: Evaluated,
    place: Ints,
    fits: Mask,
    limit: float,
    numbers: Ints | None = None,
) -> list[RankingKey]:
    """Return the strategies that fit and are no slower than the limit; simulated if there is no closed form."""
    found: list[RankingKey] = []
    for row in np.flatnonzero(fits & (outcome.step_s * (1 - BOUND_MARGIN) <= limit)).tolist():
        given = () if numbers is None else tuple(numbers[row].tolist())
        seconds = float(outcome.step_s[row])
        if not outcome.exact[row]:
            seconds = float(evaluator.simulate([space.strategy(space.rows(place[[row]]), 0, given or None)])[0])
        if seconds <= limit:
            found.append((seconds, float(outcome.memory_bytes[row]), *place[row].tolist(), given))
    return found


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= CERTIFICATE_TOLERANCE * abs(other)


def _refuse(why: str) -> NoReturn:
    raise UnsoundError(f"the certificate does not hold: {why}")
