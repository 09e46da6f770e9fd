"""Outputs of an evaluation, joined over microbatches on the ranks of the last stage.

    microbatch 0   {"logits": (2, 8, V), "loss": ()}  ─┐
    microbatch 1   {"logits": (2, 8, V), "loss": ()}  ─┴▶  {"logits": (4, 8, V), "loss": (2,)}

Tensors are concatenated along samples; 0-dimensional ones are stacked. Others without a sample dimension have to be
the same for all microbatches, and are returned once. Logits that tensor parallelism cuts along the vocabulary, and
sequences that context parallelism cuts, are all-gathered: each rank of the last stage has the whole outputs of its
replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quintsched.errors import MisfitError

from ..blocks.shape_inference import lengthened, trace_shapes, wants_data
from ..blocks.trees import Tensors, TensorSpec, TreeSpec, flatten, merged
from ..comm import Group
from ..comm.autograd_collectives import all_gather
from ..parallel.context.context_parallel import whole_sequences
from ..parallel.mesh_groups import MeshGroups
from ..stage.rank_stages import RankModel
from ..step_setup.unit_samples import UnitShape


def join_outputs(outputs: Mapping[int, Any], shape: UnitShape, model: RankModel, groups: MeshGroups) -> Any:
    """Return the outputs of all units as one tree (collective over tp and cp).

    Args:
        outputs: the last block's output for each unit, at least one.
        shape: the shape of a unit.
        model: the stages of this rank.
        groups: the groups of the mesh.

    Raises `MisfitError` where they cannot be joined.
    """
    trees, rows = zip(*(flatten(outputs[unit]) for unit in sorted(outputs)), strict=True)
    tree = merged(trees)
    if tree is None:
        raise MisfitError(f"the outputs of microbatches have different structures: {trees[0]} and {trees[-1]}")
    apart, columns = shape.parcels[-1].apart, zip(tree.paths, zip(*rows, strict=True), strict=True)
    joined = [_join(path, parts, is_apart=n in apart) for n, (path, parts) in enumerate(columns)]
    return tree.build(_gathered(joined, shape, model, groups))


def _gathered(tensors: Sequence[Tensor], shape: UnitShape, model: RankModel, groups: MeshGroups) -> Sequence[Tensor]:
    """Return the tensors with whole vocabularies (tp) and whole sequences (cp)."""
    cp, specs = groups.context.size, shape.parcels[-1].output.tensors
    if model.tensor.cuts_logits:
        tensors = [
            all_gather(tensor, groups.tensor, -1) if _is_part(tensor, spec, groups.tensor) else tensor
            for tensor, spec in zip(tensors, specs, strict=True)
        ]
    if cp == 1:
        return tensors
    longer = _specs_of_whole_sequences(shape, model, cp)
    dims = [_sequence_dim(spec, whole, cp) for spec, whole in zip(specs, longer, strict=True)]
    return [
        tensor if dim is None else whole_sequences(tensor, groups.context, dim)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]


def _specs_of_whole_sequences(shape: UnitShape, model: RankModel, cp: int) -> tuple[TensorSpec, ...]:
    """Return the specs of the last block's outputs for sequences of `cp` times the length."""
    inputs, extras = shape.spec.inputs, {name: _longer(spec, cp) for name, spec in shape.spec.extras}
    try:
        parcels = trace_shapes(model.outlines, _longer(inputs, cp), extras, model.options.dtype)
    except MisfitError as error:
        if not wants_data(error):
            raise
        return lengthened(shape.parcels[-1].output, inputs.samples.shape[1:2], cp).tensors
    return parcels[-1].output.tensors


def _join(path: str, parts: Tensors, *, is_apart: bool) -> Tensor:
    """Return one tensor for those of all units; `is_apart`: it has no sample dimension, and must be the same in all."""
    if is_apart:
        if any(not torch.equal(parts[0], part) for part in parts[1:]):
            raise MisfitError(
                f"the outputs{path} of microbatches have no sample dimension to be joined along, and differ: evaluate "
                "with microbatches=1, or give each sample a row of them, y.expand(len(x), *y.shape)"
            )
        return parts[0]
    if not parts[0].dim():
        return torch.stack(parts)
    if len({part.shape[1:] for part in parts}) > 1:
        shapes = ", ".join(dict.fromkeys(str(tuple(part.shape)) for part in parts))
        raise MisfitError(
            f"the outputs{path} of microbatches cannot be joined along samples: their shapes are {shapes}"
        )
    return torch.cat(parts)


def _is_part(tensor: Tensor, spec: TensorSpec, group: Group) -> bool:
    return bool(spec.shape) and tensor.dim() > 0 and tensor.shape[-1] * group.size == spec.shape[-1]


def _longer(spec: TreeSpec, times: int) -> TreeSpec:
    """Return a spec with dimension 1, the sequence, `times` as long."""
    tensors = (
        TensorSpec((one.shape[0], one.shape[1] * times, *one.shape[2:]), one.dtype) if len(one.shape) > 1 else one
        for one in spec.tensors
    )
    return TreeSpec(spec.tree, tuple(tensors))


def _sequence_dim(spec: TensorSpec, whole: TensorSpec, cuts: int) -> int | None:
    """Return the dimension that is `cuts` times as long for whole sequences; None: there is none."""
    places = zip(range(len(spec.shape)), spec.shape, whole.shape, strict=True)
    return next((dim for dim, part, total in places if part != total and part * cuts == total), None)
