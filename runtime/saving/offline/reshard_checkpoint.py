"""Resharding of a checkpoint for another mesh, in one process: a window of a tensor at a time, whatever its size.

    stage 0 ─▶ pp 0: ranks 0 1 4 5     the ranks that hold a stage share each tensor evenly, and no number is stored
    stage 1 ─▶ pp 1: ranks 2 3 6 7     twice; the run decides which parts a rank reads

Stages have blocks of about as many bytes; a run that assigns them otherwise reads from other files, too. Weights from
elsewhere become a checkpoint of step 0 in one file, which any mesh can start from.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from quintsched.errors import InputError, MisfitError, UsageError
from quintsched.files.atomic import write_whole, writing
from quintsched.ir.mesh import Mesh
from quintsched.plan import Plan

from ...stage.build_stages import cut, cut_as_planned
from ...weights_and_gradients.rank_state_dict import STATES
from ..atomic_output_folder import standing
from ..checkpoints.atomic_run_folder import step_folder
from ..checkpoints.bucket_folder import Place
from ..checkpoints.folder_owner import new_run_folder
from ..checkpoints.manifest import MANIFEST, Manifest, file_name, make_manifest
from ..checkpoints.save_and_load_checkpoints import LOADER, plan_digest
from ..index_ranges_in_full_tensors import LAYOUT, StateLayout, TensorPlacement
from ..lazy_tensors import open_folder
from ..load_state import require_of_any_mesh
from ..saved_state import AVERAGE, MODEL, STATE, SavedState
from ..write_tensors import WHAT, FileEntry, WrittenFile, in_file_order, write_tensors

KEEP_ALL = 2**31
"""Number of checkpoints kept: all."""


def reshard(saved: SavedState, manifest: Manifest, plan: Plan, output: Place) -> str:
    """Write a checkpoint for a plan's ranks into the folder `output`, and return its step's folder, as shown.

    Raises `MisfitError` for states of optimizers that have no place in a full tensor, `UsageError` where nothing can
    be written, or the folder has a run's steps.
    """
    if saved.beside:
        raise MisfitError(
            f"{saved.where}: {next(iter(saved.beside))!r} is of a shard of its weight, and has no place in a "
            "whole one; resume with the tp and the ZeRO stage that wrote it"
        )
    shares, step = _shares(saved, plan), manifest.step

    def write(folder: Path) -> Manifest:
        ranks = enumerate(shares)
        files = [_write_rank(saved, folder / file_name(rank), plan, rank, share) for rank, share in ranks]
        digest, run = plan_digest(plan), manifest.run or _new_run()
        return make_manifest(run, step, digest, plan.mesh, files, manifest.progress, manifest.settings)

    return _write_step(output, step, write)


def _new_run() -> str:
    return os.urandom(8).hex()


def _write_step(output: Place, step: int, write: Callable[[Path], Manifest]) -> str:
    """Write a checkpoint into the folder of a new run; it counts only when all of it is on disk.

    Raises `UsageError` where a run saves there, or has saved.
    """
    with new_run_folder(output) as folder, writing(folder.where, WHAT):
        attempt, final = folder.next_attempt(), step_folder(folder.directory, step)
        try:
            attempt.mkdir()
            manifest = write(attempt)
            for file in manifest.files:
                folder.publish(attempt / file.name, final)
            write_whole(attempt / MANIFEST, manifest.to_json(), WHAT, durable=True)
            folder.complete(attempt, step, KEEP_ALL)
        except BaseException:
            shutil.rmtree(attempt, ignore_errors=True)
            raise
        return folder.shown(final)


def _shares(saved: SavedState, plan: Plan) -> list[dict[str, TensorPlacement]]:
    """Return the content of each rank's file by name: a whole tensor, or a range of its flat numbers."""
    mesh = plan.mesh
    pp_of = _pp_of_blocks(saved, plan)
    holders = [[rank for rank in range(mesh.size) if mesh.pp_rank(rank) == pp] for pp in range(mesh.axis_size("pp"))]
    found: list[dict[str, TensorPlacement]] = [{} for _ in range(mesh.size)]
    for name in saved.pieces:
        if name in (LOADER, STATES):
            continue
        shape = saved.shape(name)
        if name.startswith("engine."):
            require_of_any_mesh(saved, name)
        ranks, count = holders[pp_of.get(block_of(name), 0)], prod(shape)
        if not shape or count < len(ranks):
            found[ranks[0]][name] = TensorPlacement.whole(shape)
            continue
        for index, rank in enumerate(ranks):
            span = (index * count // len(ranks), (index + 1) * count // len(ranks))
            found[rank][name] = TensorPlacement.whole(shape, span if len(ranks) > 1 else None)
    return found


def _pp_of_blocks(saved: SavedState, plan: Plan) -> dict[int, int]:
    """Return the pp coordinate of each block; of stages that hold the same blocks, the first one's."""
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
    """Return the number of the block that a tensor belongs to; 0 for names without one."""
    rest = name.removeprefix(MODEL).removeprefix(STATE)
    if name.startswith(AVERAGE):
        rest = name.split(".", 2)[-1]
    first = rest.partition(".")[0]
    return int(first) if first.isdecimal() else 0


def _write_rank(
    saved: SavedState, path: Path, plan: Plan, rank: int, share: Mapping[str, TensorPlacement]
) -> WrittenFile:
    at, mesh = plan.mesh.coordinates(rank), plan.mesh
    replica = at.get("dp", 0) * mesh.axis_size("ep") + at.get("ep", 0)
    num_replicas = mesh.axis_size("dp") * mesh.axis_size("ep")
    names = {name.removeprefix(MODEL) for name in share}
    own = {n: called for layout in saved.layouts for n, called in layout.own_names.items() if n in names}
    dtypes = {
        n: dtype for layout in saved.layouts for n, dtype in layout.dtypes.items() if n.removeprefix(MODEL) in names
    }
    placements = {name: placement for name, placement in share.items() if not placement.is_plain}
    layout = StateLayout((replica, num_replicas), placements, {}, dtypes, own, saved.layouts[0].same)
    entries = [FileEntry(name, name, saved.dtype(name), placement.held) for name, placement in share.items()]
    parts: dict[str, Iterable[Tensor]] = {name: saved.windows(name, held.span) for name, held in share.items()}
    loader = saved.of_replica(LOADER, replica, num_replicas)
    if loader is not None:
        entries.append(FileEntry(LOADER, LOADER, loader.dtype, tuple(loader.shape)))
        parts[LOADER] = [loader]
    entries = in_file_order(entries)
    numbers = chain.from_iterable(parts[entry.name] for entry in entries)
    return write_tensors(path, entries, numbers, {LAYOUT: layout.to_text()})


def import_weights(source: Path, output: Place) -> str:
    """Write a checkpoint of step 0 with the tensors of a safetensors file or folder, under the names that they have.

    Raises `InputError` for a source that is damaged, `UsageError` where there is none, or nothing can be written.
    """
    tensors = open_folder(standing(source)).tensors
    if not tensors:
        raise InputError(f"{source}: there are no tensors in it")
    saved = SavedState(str(source))
    for name, stored in tensors.items():
        saved.add_piece(MODEL + name, name, TensorPlacement.whole(stored.shape), stored)
    entries = in_file_order(FileEntry(name, name, saved.dtype(name), saved.shape(name)) for name in saved.pieces)

    def write(attempt: Path) -> Manifest:
        parts = (window for entry in entries for window in saved.windows(entry.name))
        file = write_tensors(attempt / file_name(0), entries, parts, {LAYOUT: StateLayout().to_text()})
        return make_manifest(_new_run(), 0, hashlib.sha256(b"").hexdigest(), Mesh(), [file], {})

    return _write_step(output, 0, write)


def plan_for(manifest: Manifest, mesh: str, **given: Any) -> Plan:
    """Return the plan to reshard for: settings of the saved run, overridden by the mesh and `given`.

    Raises `UsageError` for settings that cannot be compiled.
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
