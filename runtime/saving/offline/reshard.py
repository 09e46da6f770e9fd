"""A checkpoint cut anew for another mesh, in one process: a window of a tensor at a time, whatever the model's size.

    stage 0 ─▶ pp 0: ranks 0 1 4 5     of each tensor, each of the ranks that hold a stage has an even share, and
    stage 1 ─▶ pp 1: ranks 2 3 6 7     nothing lies in two files; what a rank reads of it, its run decides

Stages have blocks of about as many bytes; a run that cuts them otherwise reads from other files, too. Weights from
elsewhere become a checkpoint of step 0 in one file, from which any mesh begins.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from quintsched.errors import InputError, MisfitError, UsageError
from quintsched.files.atomic import write_whole, writing
from quintsched.ir.mesh import Mesh
from quintsched.plan import Plan

from ...stage.build import cut, cut_as_planned
from ...state.state_dict import STATES
from ..checkpoints.checkpoints import LOADER
from ..checkpoints.manifest import MANIFEST, Manifest, file_name, make_manifest
from ..load_state import require_of_any_mesh
from ..placement import Placement
from ..pretrained.safetensors_folder import open_folder
from ..replaced_folder import standing
from ..saved_state import AVERAGE, MODEL, STATE, SavedState
from ..state_layout import LAYOUT, StateLayout
from ..write_tensors import WHAT, FileEntry, WrittenFile, in_file_order, write_tensors
from .new_folder import new_run_folder

ALL = 2**31
"""How many checkpoints stay: all."""


@dataclass(frozen=True)
class Share:
    """What a rank's file has of a tensor: all of it, or the numbers [start, stop) of the flat one."""

    name: str
    placement: Placement


def reshard(saved: SavedState, manifest: Manifest, plan: Plan, output: Path) -> Path:
    """Write a checkpoint for a plan's ranks into the folder `output`, and return where it lies.

    Raises `MisfitError` for states of optimizers that have no place in a whole tensor, `UsageError` where nothing can
    be written, or a run's steps are.
    """
    if saved.beside:
        raise MisfitError(
            f"{saved.where}: {next(iter(saved.beside))!r} is of a shard of its weight, and has no place in a "
            "whole one; resume with the tp and the ZeRO stage that wrote it"
        )
    shares = _shares(saved, plan)

    def write(folder: Path) -> list[WrittenFile]:
        return [
            _write_rank(saved, folder / file_name(rank), plan, rank, shares[rank]) for rank in range(plan.mesh.size)
        ]

    digest = hashlib.sha256(plan.to_json().encode()).hexdigest()
    return _write_step(
        output,
        manifest.step,
        write,
        lambda files: make_manifest(
            manifest.run or _new_run(), manifest.step, digest, plan.mesh, files, manifest.progress, manifest.settings
        ),
    )


def _new_run() -> str:
    return os.urandom(8).hex()


def _write_step(
    output: Path,
    step: int,
    write: Callable[[Path], list[WrittenFile]],
    manifest_of: Callable[[Sequence[WrittenFile]], Manifest],
) -> Path:
    """Write a checkpoint into the folder of a new run; it counts only when all of it is on the disk.

    Raises `UsageError` where a run saves there, or has saved.
    """
    with new_run_folder(output) as folder, writing(output, WHAT):
        attempt = folder.next_attempt()
        try:
            attempt.mkdir()
            write_whole(attempt / MANIFEST, manifest_of(write(attempt)).to_json(), WHAT, durable=True)
            folder.complete(attempt, step, ALL)
        except BaseException:
            shutil.rmtree(attempt, ignore_errors=True)
            raise
    return folder.step_folder(step)


def _shares(saved: SavedState, plan: Plan) -> list[list[Share]]:
    """Return what each rank's file has."""
    mesh = plan.mesh
    pp_of = _pp_of_blocks(saved, plan)
    holders = [[rank for rank in range(mesh.size) if mesh.pp_rank(rank) == pp] for pp in range(mesh.axis_size("pp"))]
    found: list[list[Share]] = [[] for _ in range(mesh.size)]
    for name in saved.pieces:
        if name in (LOADER, STATES):
            continue
        shape = saved.shape(name)
        if name.startswith("engine."):
            require_of_any_mesh(saved, name)
        ranks, count = holders[pp_of.get(block_of(name), 0)], prod(shape)
        if not shape or count < len(ranks):
            found[ranks[0]].append(Share(name, Placement.whole(shape)))
            continue
        for index, rank in enumerate(ranks):
            span = (index * count // len(ranks), (index + 1) * count // len(ranks))
            found[rank].append(Share(name, Placement.whole(shape, span if len(ranks) > 1 else None)))
    return found


def _pp_of_blocks(saved: SavedState, plan: Plan) -> dict[int, int]:
    """Return which pp coordinate has each block; of stages that hold the same blocks, the first one's."""
    sizes: dict[int, float] = {}
    for name in saved.pieces:
        if name.startswith(MODEL):
            sizes[block_of(name)] = sizes.get(block_of(name), 0.0) + prod(saved.shape(name))
    costs = [sizes.get(number, 0.0) for number in range(1 + max(sizes, default=0))]
    cuts = cut_as_planned(plan, len(costs)) if plan.blocks_per_stage else cut(costs, plan.layout)
    found: dict[int, int] = {}
    for stage, blocks in enumerate(cuts):
        for number in blocks:
            found.setdefault(number, plan.stage_to_pp[stage])
    return found


def block_of(name: str) -> int:
    """Return the number of the block that a tensor belongs to; 0 for what is not named by one."""
    rest = name.removeprefix(MODEL).removeprefix(STATE)
    if name.startswith(AVERAGE):
        rest = name.split(".", 2)[-1]
    first = rest.partition(".")[0]
    return int(first) if first.isdecimal() else 0


def _write_rank(saved: SavedState, path: Path, plan: Plan, rank: int, shares: Sequence[Share]) -> WrittenFile:
    at, mesh = plan.mesh.coordinates(rank), plan.mesh
    replica = at.get("dp", 0) * mesh.axis_size("ep") + at.get("ep", 0)
    num_replicas = mesh.axis_size("dp") * mesh.axis_size("ep")
    names = {share.name.removeprefix(MODEL) for share in shares}
    own = {n: called for layout in saved.layouts for n, called in layout.own_names.items() if n in names}
    dtypes = {
        n: dtype for layout in saved.layouts for n, dtype in layout.dtypes.items() if n.removeprefix(MODEL) in names
    }
    placements = {share.name: share.placement for share in shares if not share.placement.is_plain}
    layout = StateLayout((replica, num_replicas), placements, {}, dtypes, own, saved.layouts[0].same)
    of = {share.name: share.placement for share in shares}
    entries = [FileEntry(name, name, saved.dtype(name), placement.held) for name, placement in of.items()]
    loader = saved.of_replica(LOADER, replica, num_replicas)
    if loader is not None:
        entries.append(FileEntry(LOADER, LOADER, loader.dtype, tuple(loader.shape)))

    def parts_of(entry: FileEntry) -> Iterable[Tensor]:
        return (
            saved.windows(entry.name, of[entry.name].span) if entry.name in of else [] if loader is None else [loader]
        )

    entries = in_file_order(entries)
    return write_tensors(
        path, entries, (part for entry in entries for part in parts_of(entry)), {LAYOUT: layout.to_text()}
    )


def import_weights(source: Path, output: Path) -> Path:
    """Write a checkpoint of step 0 with the tensors of a safetensors file or folder, under the names that they have.

    Raises `InputError` for a source that is damaged, `UsageError` where there is none, or nothing can be written.
    """
    tensors = open_folder(standing(source)).tensors
    if not tensors:
        raise InputError(f"{source}: there are no tensors in it")
    saved = SavedState(str(source))
    for name, stored in tensors.items():
        saved.add(MODEL + name, name, Placement.whole(stored.shape), stored)
    entries = in_file_order(FileEntry(name, name, saved.dtype(name), saved.shape(name)) for name in saved.pieces)

    def write(attempt: Path) -> list[WrittenFile]:
        parts = (window for entry in entries for window in saved.windows(entry.name))
        return [write_tensors(attempt / file_name(0), entries, parts, {LAYOUT: StateLayout().to_text()})]

    nothing = hashlib.sha256(b"").hexdigest()
    return _write_step(output, 0, write, lambda files: make_manifest(_new_run(), 0, nothing, Mesh(), files, {}))


def plan_for(manifest: Manifest, mesh: str, **given: Any) -> Plan:
    """Return the plan that a checkpoint is cut for: the settings of its run, but for the mesh and what is `given`.

    Raises `UsageError` for what cannot be compiled.
    """
    from quintsched.compiler import compile_request
    from quintsched.request import CompileRequest

    said = manifest.settings
    kept = {
        name: said[f"parallel.{name}"]
        for name in ("schedule", "microbatches", "zero", "buckets_per_stage")
        if said.get(f"parallel.{name}") is not None
    }
    wanted = kept | {name: value for name, value in given.items() if value is not None}
    pp = Mesh.parse(mesh).axis_size("pp")
    request = {"schedule": "1f1b", "microbatches": max(2 * pp, 1)} | wanted | {"mesh": mesh}
    try:
        return compile_request(CompileRequest.of_data(request))
    except UsageError as error:
        raise UsageError(f"{error}; give --schedule and --microbatches that go with --mesh {mesh}") from None
