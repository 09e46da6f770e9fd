"""Shards of parameters over a group: the record on each parameter, slicing and gathering, and checks of replicas.

The outputs of a layer may be fused blocks (`parts`): each rank has its shard of every block.

parts 3          [ q0 q1 | k0 k1 | v0 v1 ]          rank 0: q0 k0 v0
parts (2, 1, 1)  [ q0 q0 q1 q1 | k0 k1 | v0 v1 ]    rank 0: q0 q0 k0 v0
parts 1          [ q0 k0 v0 | q1 k1 v1 ]            rank 0: q0 k0 v0         interleaved by heads

The checks find two causes of a silently wrong tensor-parallel run: ranks that start from different replicated
parameters, and a replicated parameter that is applied to a sharded tensor (a norm of the queries, say), whose gradient
on each rank is then only a partial sum.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError

from ...comm import Group, ReduceOp
from ...comm.autograd_collectives import gather_from_group
from ...settings.tensor_parallel_rules import FusedParts
from ...user_objects.library_or_user import is_ours
from ...user_objects.object_contents import hooks_on
from .cuttable_layers import is_replaced, join


@dataclass(frozen=True)
class TpShard:
    """Slice `index` of `size` along `dim`, taken from each of the fused blocks (`parts`) and concatenated."""

    dim: int
    parts: FusedParts
    index: int
    size: int

    def places(self, total: int) -> list[slice]:
        """Return the slices of a full dimension of length `total` that make up the shard: one per fused block."""
        places, start = [], 0
        for block in block_sizes(total, self.parts):
            here = block // self.size
            places.append(slice(start + self.index * here, start + (self.index + 1) * here))
            start += block
        return places


def shard_of(param: Tensor) -> TpShard | None:
    """Return the shard that `param` is; None: it is replicated."""
    shard: TpShard | None = getattr(param, "_quintsched_shard", None)
    return shard


def mark_shard(param: Tensor, shard: TpShard) -> None:
    """Record on `param` which shard it is."""
    param._quintsched_shard = shard  # type: ignore[attr-defined]


def take_shard(full: Tensor, shard: TpShard) -> Tensor:
    """Return the slice of `full` that `shard` describes, as a contiguous copy; the inverse of `gather_full`.

    Raises:
        MisfitError: the dimension does not divide.
    """
    require_even(full.shape[shard.dim], shard.size, f"features of {tuple(full.shape)}", shard.parts)
    pieces = [full.detach().narrow(shard.dim, p.start, p.stop - p.start) for p in shard.places(full.shape[shard.dim])]
    return torch.cat(pieces, shard.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)


def gather_full(param: Tensor, group: Group, shard: TpShard | None = None) -> Tensor:
    """All-gather the full tensor of which each member's `param` is a slice, detached; a copy if it is replicated.

    Args:
        param: a parameter, or with `shard` any tensor cut like one (a gradient, an optimizer state).
        group: all its members must call this.
        shard: default `shard_of(param)`.

    Raises:
        MisfitError: cut over a group of another size.
    """
    shard = shard or shard_of(param)
    mine = param.detach()
    if shard is None:
        return mine.clone()
    if shard.size != group.size:
        raise MisfitError(f"a parameter cut into {shard.size} cannot be gathered over a group of {group.size}")
    return gather_blocks(mine, group, shard.dim, shard.parts).clone()


def gather_blocks(tensor: Tensor, group: Group, dim: int, parts: FusedParts) -> Tensor:
    """All-gather the members' slices along `dim` (from 0, or -1), block by block; the backward slices the gradient."""
    if isinstance(parts, int):
        at = dim % tensor.dim()
        blocks = tensor.reshape(*tensor.shape[:at], parts, 1, -1, *tensor.shape[at + 1 :])
        return gather_from_group(blocks, group, at + 1).flatten(at, at + 2)
    pieces = tensor.split(block_sizes(tensor.shape[dim], parts), dim)
    return torch.cat([gather_from_group(piece, group, dim) for piece in pieces], dim)


def block_sizes(total: int, parts: FusedParts) -> list[int]:
    """Return the sizes of the fused blocks of a dimension of length `total`, which `parts` must divide."""
    proportions = (1,) * parts if isinstance(parts, int) else parts
    unit = total // sum(proportions)
    return [unit * proportion for proportion in proportions]


def require_even(total: int, size: int, what: str, parts: FusedParts = 1) -> None:
    """Check that each of the fused blocks of `total` can be cut into `size`.

    Raises:
        MisfitError: some block cannot; the message lists the sizes that can.
    """
    if not divides(total, size, parts):
        choices = ", ".join(str(n) for n in range(1, min(total, 1024) + 1) if divides(total, n, parts))
        blocks = "" if parts == 1 else f" (in {parts} fused blocks)" if isinstance(parts, int) else f" (parts {parts})"
        raise MisfitError(f"tp={size} does not divide the {total} {what}{blocks}; choose tp from {choices or 'none'}")


def divides(total: int, size: int, parts: FusedParts) -> bool:
    """Whether each of the fused blocks of `total` can be cut into `size`."""
    if isinstance(parts, int):
        return total % (parts * size) == 0
    return total % sum(parts) == 0 and all(block % size == 0 for block in block_sizes(total, parts))


_PARAMETER_TOLERANCE = 1e-9
_GRADIENT_TOLERANCE = 1e-2


def require_same(named: Mapping[str, Tensor], group: Group) -> None:
    """Check that floating-point tensors have the same norms on all members, except on the meta device (collective).

    Raises:
        MisfitError: some differ; the message names the first. All members raise together.
    """
    names = [name for name, tensor in named.items() if not tensor.is_meta and tensor.is_floating_point()]
    if group.size == 1 or not names:
        return
    odd = _differing([named[name] for name in names], group, _PARAMETER_TOLERANCE)
    if odd:
        raise MisfitError(
            f"{len(odd)} of {len(names)} parameters differ between the ranks {list(group.ranks)}, first "
            f"{names[odd[0]]!r}; seed all ranks alike or load the same checkpoint before cutting"
        )


def watch_gradient(param: Tensor, name: str, group: Group, rules: Mapping[str, str]) -> None:
    """Check at the first backward that the gradient of a replicated parameter is the same on all members.

    The backward raises MisfitError if it is not; the message has `rules` that keep the layers around it whole.
    """

    def check(grad: Tensor) -> None:
        handle.remove()
        if _differing([grad], group, _GRADIENT_TOLERANCE):
            raise MisfitError(
                f"the gradient of {name!r} differs between the ranks {list(group.ranks)}: this replicated parameter "
                f"works on a cut tensor; keep the layers around it whole: rules={rules}"
            )

    handle = param.register_hook(check)


def _differing(tensors: list[Tensor], group: Group, tolerance: float) -> list[int]:
    """Return the indices of tensors whose norms differ between ranks by more than `tolerance` of the greatest."""
    norms = [torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64).to(group.device) for tensor in tensors]
    high = torch.stack(norms).nan_to_num()
    low = high.clone()
    for work in (group.all_reduce(high, ReduceOp.MAX), group.all_reduce(low, ReduceOp.MIN)):
        work.wait()
    return torch.nonzero(high - low > tolerance * high).flatten().tolist()


class CutLayers:
    """Record of the sharded layers of this rank as they were cut, to refuse later changes that would have no effect."""

    def __init__(self) -> None:
        self.layers: list[tuple[str, nn.Module, type, Set[str]]] = []
        self._weights: list[tuple[str, nn.Parameter]] = []

    def add_block(self, block: nn.Module, path: str) -> None:
        """Record the sharded layers of a block."""
        for name, module in block.named_modules(prefix=path):
            weights = [(join(name, key), p) for key, p in module._parameters.items() if p is not None and shard_of(p)]
            self._weights += weights
            self.layers += [(name, module, type(module), frozenset(vars(module)))] if weights else []

    def require_as_cut(self, names: Collection[str]) -> None:
        """Raise `MisfitError` if a training loop has changed a recorded layer: hooks on its weights, its class, its
        methods, or attributes of `names`, which code of its block reads.
        """
        for name, weight in self._weights:
            if not all(map(is_ours, hooks_on(weight))):
                _refuse(f"a hook was registered on the weight {name!r}")
        for name, layer, kind, known in self.layers:
            if type(layer) is not kind:
                _refuse(f"the class of the layer {name!r} was replaced")
            if len(vars(layer)) != len(known):
                for key in vars(layer).keys() - known:
                    if hasattr(kind, key):
                        _refuse(f"{key!r} was set on the layer {name!r}")
                    if key in names:
                        what = f"{key!r}, which its block's code names, was set on the layer {name!r}"
                        raise MisfitError(f"{what}, of which a rank of tp has a shard: set it on the block")
        if self.layers and is_replaced():
            _refuse("torch's own forward of linear layers or embeddings was replaced")


def _refuse(what: str) -> None:
    raise MisfitError(
        f"{what}, of which a rank of tp has a shard: do so before the engine is built, which then keeps the layer "
        "whole; build the engine again"
    )
