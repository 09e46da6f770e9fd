"""Pretrained weights: each rank reads from safetensors files no more than the slices that it holds.

    file    h.0.attn.c_attn.weight (D, 3D)     ░░▓░░▓░░▓    ▓: the columns that this rank reads,
    rank    1.attention.qkv.weight (3D/tp, D)  ▓▓▓          joined, transposed, and cast to the weight's type

All ranks know first what the checkpoint lacks, has beyond the model, or has in other shapes; only then is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from quintsched.errors import InputError, MisfitError, QuintschedError, nearest

from ..blocks.number_types import require_kind
from ..comm.control import ControlGroup
from .boxes import Box
from .conversions import in_model_names
from .folders import standing
from .gpt2 import require_gpt2
from .held import HeldTensor
from .model_names import ModelNames
from .names import OLD_BUFFERS, Origin, Prefix, find_prefix, join_tied, matches
from .safetensors_folder import Folder, Lying, open_folder, shape_fault

MOST_NAMED = 5
"""How many names an error lists."""


@dataclass(frozen=True)
class LoadedWeights:
    """What a checkpoint and the model did not have in common.

    Attributes:
        fresh: weights that the checkpoint lacks, by our names: they keep their initial values.
        unused: tensors that no weight takes.
        beside: values that were asked for besides, by name; None where there is none.
    """

    fresh: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    beside: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Wanted:
    """A tensor of this rank, and where it lies: under each of its names that the checkpoint has."""

    held: HeldTensor
    origin: Origin
    lying: Mapping[str, Lying]


@torch.no_grad()
def load_pretrained(
    path: Path,
    names: ModelNames,
    held: Sequence[HeldTensor],
    everyone: ControlGroup,
    *,
    given: Mapping[str, str] | None,
    fresh: Sequence[str],
    strict: bool,
) -> LoadedWeights:
    """Let what this rank holds be what a checkpoint has; see `CheckpointFiles.load_pretrained`. All ranks call this."""
    path = standing(path, says=everyone.is_first)
    with ExitStack() as stack:
        folder = everyone.together(lambda: in_model_names(stack.enter_context(open_folder(path)), names))
        origins, prefix = everyone.together(lambda: _origins(folder, names, given))
        wanted, lacking = _find(folder, held, join_tied(origins, names.same()), prefix)
        loaded = _compare(folder, wanted, lacking, everyone, names.may_stay(fresh), strict=strict)
        everyone.together(lambda: _read_all(folder, wanted))
        return loaded


def _origins(folder: Folder, names: ModelNames, given: Mapping[str, str] | None) -> tuple[dict[str, Origin], Prefix]:
    """Return where each of the model's tensors is found, and what is to be done with these names in this folder."""
    found = folder.tensors.keys()
    try:
        origins = names.origins(given, found)
        if given is None and names.is_gpt2(found):
            require_gpt2(names.outlines, found, folder.config)
    except MisfitError as error:
        raise MisfitError(f"{folder.path}: {error}") from None
    return origins, find_prefix((origin.name for origin in origins.values()), found)


def _find(
    folder: Folder, held: Sequence[HeldTensor], origins: Mapping[str, Origin], prefix: Prefix
) -> tuple[list[Wanted], list[tuple[str, str]]]:
    """Return what is found of this rank's tensors, and what is not: (name in the checkpoint, our name)."""
    wanted, lacking = [], []
    for one in held:
        origin = origins[one.name]
        lying = origin.lying(folder.tensors, prefix)
        if lying:
            wanted.append(Wanted(one, origin, lying))
        else:
            lacking.append((prefix.in_file(origin.name), one.name))
    return wanted, lacking


def _compare(
    folder: Folder,
    wanted: Sequence[Wanted],
    lacking: Sequence[tuple[str, str]],
    everyone: ControlGroup,
    fresh: Sequence[str],
    *,
    strict: bool,
) -> LoadedWeights:
    """Raise on every rank the same error where names or shapes do not fit; else say what is fresh, and unused."""
    shapes = everyone.together(lambda: [fault for one in wanted if (fault := _shape_fault(folder, one))])
    used = [name for one in wanted for name in one.lying]
    shared = [json.loads(said) for said in everyone.share_bytes(json.dumps([used, lacking, shapes]).encode())]
    all_used = {name for used, _, _ in shared for name in used}
    all_lacking = dict(tuple(pair) for _, lacking, _ in shared for pair in lacking)
    unused = [name for name in folder.tensors if name not in all_used and not OLD_BUFFERS.search(name)]
    missing = {name: ours for name, ours in all_lacking.items() if not (matches(name, fresh) or matches(ours, fresh))}
    if missing:
        raise _missing(folder, missing, unused)
    if unused and strict:
        raise MisfitError(
            f"{folder.path}: the model has no weight for {listed(unused)} of the checkpoint"
            f"{nearest(unused[0], all_used)}; leave that out with strict=False (in a job, model.strict: false)"
        )
    for _, _, faults in shared:
        if faults:
            raise MisfitError(faults[0])
    return LoadedWeights(tuple(ours for name, ours in all_lacking.items()), tuple(unused))


def _missing(folder: Folder, missing: Mapping[str, str], unused: Sequence[str]) -> QuintschedError:
    first, ours = next(iter(missing.items()))
    more = f", nor {listed(list(missing)[1:])}" if len(missing) > 1 else ""
    near = nearest(first, unused or folder.tensors)
    return InputError(
        f"{folder.path}: the checkpoint has no tensor {first!r} (for {ours}){more}{near}; where these weights are to "
        f"keep their initial values, say so with fresh={[*missing][:MOST_NAMED]!r} (in a job, model.fresh)"
    )


def listed(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(map(repr, names[:MOST_NAMED])) + more


def _shape_fault(folder: Folder, wanted: Wanted) -> str | None:
    """Say which axis of a tensor has another size than the weight that it is for."""
    turn = -1 if wanted.origin.transposed else 1
    needs = wanted.held.placement.shape[::turn]
    for name, lying in wanted.lying.items():
        fault = shape_fault(lying.shape, needs, cut_short=wanted.origin.is_cut_short)
        if fault is not None:
            return f"{folder.path}: {name!r} is {lying.shape}, but {wanted.held.name} needs {needs}: {fault}"
    return None


def _read_all(folder: Folder, wanted: Sequence[Wanted]) -> None:
    for one in wanted:
        for box in one.held.boxes():
            _read(folder, one, box.turned() if one.origin.transposed else box)


def _read(folder: Folder, wanted: Wanted, box: Box) -> None:
    (first, lying), *others = wanted.lying.items()
    found = lying.read(box.places)
    require_kind(str(folder.path), first, found.dtype, wanted.held.name, box.numbers.dtype)
    for name, other in others:
        if not torch.equal(found, other.read(box.places)):
            both = " and ".join(sorted(map(repr, (first, name))))
            raise MisfitError(f"{folder.path}: {both} differ, but the model ties them; build it untied")
    box.numbers.copy_(found)
