"""The global 2-norm of a batch's gradient, over the whole mesh, and scaling by it.

    every rank     Σ squares of what it counts     of copies along tp, ep and of tied weights, one rank counts
                        │ all-reduce
                   Σ over the whole model

Where replicas hold shards, the sum runs over all ranks; else over one replica of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ..comm import Work
from ..parallel.mesh_groups import MeshGroups
from ..stage.tied_weights import TiedWeights
from .grad_buckets import GradBucket, GradBuckets


class GradNorm:
    """The norm of the gradients of one rank and of all.

    Args:
        buckets: all gradients of this rank's stages.
        groups: the groups of the mesh.
        tied: weights that several stages hold.
        twin_stages: stages that a twin on another rank counts for.
        sharded: whether replicas hold shards of what is reduced.
    """

    def __init__(
        self,
        buckets: GradBuckets,
        groups: MeshGroups,
        tied: TiedWeights,
        *,
        twin_stages: Collection[int],
        sharded: bool,
    ) -> None:
        self._buckets, self._groups, self._tied, self._sharded = buckets, groups, tied, sharded
        self._device = groups.world.device
        counting = [bucket for bucket in buckets if bucket.stage not in twin_stages]
        self._counted = list(self._find_counted(bucket for bucket in counting if not bucket.comes_summed))
        self._counted_summed = list(self._find_counted(bucket for bucket in counting if bucket.comes_summed))
        self._has_summed = any(bucket.comes_summed for bucket in buckets)

    def _find_counted(self, buckets: Iterable[GradBucket]) -> Iterator[Tensor]:
        """Yield what of these buckets this rank counts: whole flat buffers where it can."""
        for bucket in buckets:
            yield from bucket.counted([self._counts(parameter) for parameter in bucket.parameters])

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts a parameter: of copies along tp or ep, and of tied ones, one does."""
        differs_along_ep = self._sharded or self._buckets.is_of_experts(self._buckets.home[parameter][0])
        return self._tied.counts(parameter) and self._groups.counts(parameter, is_expert=differs_along_ep)

    def square(self) -> tuple[Tensor, Work]:
        """Return the square of the 2-norm of the whole model's gradient, to be waited for: 0-dimensional, float64."""
        square = self._square(self._counted)
        if self._sharded:
            return square, self._groups.world.all_reduce(square)
        if self._has_summed:
            summed = self._square(self._counted_summed)
            self._groups.replicas.all_reduce(summed).wait()
            square = square + summed if self._groups.experts.index == 0 else square  # ranks along ep meet below
        return square, self._groups.model.all_reduce(square)

    def _square(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum of all squares: 0-dimensional, float64."""
        norms = [torch.linalg.vector_norm(tensor) for tensor in tensors]
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        if len(norms) == 1:
            square = norms[0].to(torch.float64).square()
        elif norms:
            square = torch.stack([norm.to(torch.float64) for norm in norms]).square().sum()
        return square

    def clip(self, norm: Tensor, threshold: float) -> None:
        """Scale every gradient so that the global norm, which is `norm`, comes under the threshold."""
        factor = torch.clamp(threshold / (norm + 1e-6), max=1.0)
        for bucket in self._buckets:
            bucket.shard.mul_(factor)
