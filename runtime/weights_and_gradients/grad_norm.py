"""Global 2-norm of a batch's gradient, over the whole mesh, and gradient clipping by it.

    every rank     Σ squares of the part it counts     of copies along tp, ep and of tied weights, one rank counts
                        │ all-reduce
                   Σ over the whole model

Where replicas hold shards, the sum runs over all ranks; otherwise over one replica of the model.

A parameter that no microbatch on any rank has used has no gradient, and is not stepped, as in one process. A missing
gradient is stored as -0.0: it adds nothing to sums, and adding a gradient of zeros makes it +0.0, so that the sums show
whether one has come. Where backwards of this rank left a bucket incomplete, the first number of each parameter is
tested, along with the norm; all numbers are tested only where a first one is -0.0 on some rank.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..comm import ReduceOp, Work
from ..comm.device import is_accelerator, numbers_of
from ..parallel.mesh_groups import MeshGroups
from ..stage.tied_weights import TiedWeights
from .grad_buckets import IN_CACHE, GradBucket, GradBuckets, as_real, is_untouched
from .master_weights import Masters

_norm = torch.linalg.vector_norm

CLIP_EPSILON = 1e-6
"""Added to the norm in the divisor, as in `torch.nn.utils.clip_grad_norm_`."""


class GradNorm:
    """The gradient norm of one rank, and of the whole model.

    Args:
        buckets: all gradients of this rank's stages.
        groups: the groups of the mesh.
        tied: weights that several stages hold.
        twin_stages: stages that are counted by a twin on another rank.
        sharded: whether replicas hold shards of the reduced gradients.
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
        self._device, self._figures, self._here = groups.world.device, torch.empty(0), array("d")
        shares = [
            (
                bucket.comes_summed,
                _Share.from_sums(bucket.shard, [] if bucket.stage in twin_stages else self._counted(bucket)),
            )
            for bucket in buckets.all
        ]
        self._reduced = [share for comes_summed, share in shares if not comes_summed]
        self._summed = [share for comes_summed, share in shares if comes_summed]

    def _counted(self, bucket: GradBucket) -> list[Tensor]:
        """Return the parts of a bucket that this rank counts: the whole shard where possible."""
        return bucket.counted([self._counts(parameter) for parameter in bucket.parameters])

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts a parameter: one rank does for copies along tp or ep, and for tied weights."""
        differs_along_ep = self._sharded or self._buckets.is_of_experts(self._buckets.home[parameter][0])
        return self._tied.counts(parameter) and self._groups.counts(parameter, is_expert=differs_along_ep)

    def divide(
        self, weight: Tensor | float, *beside: Tensor | float, row: Tensor | Sequence[Tensor | float] = ()
    ) -> tuple[Tensor, Work]:
        """Divide the gradient sums, which are complete, by the batch's total loss weight: see `Tally.weight`.

        Return the squared 2-norm of the whole model's gradient, and the sums of `beside` and `row` over ranks, with a
        work to wait for: one tensor (1 + beside + row,), float64. `beside` are 0-dimensional, `row` (n,), float64.
        """
        square = _divide(self._reduced, weight)
        if self._summed:
            summed = torch.as_tensor(_divide(self._summed, weight), dtype=torch.float64, device=self._device)
            if not self._sharded:
                self._groups.replicas.all_reduce(summed).wait()
                square = square + summed if self._groups.experts.index == 0 else square  # ranks along ep meet below
        if isinstance(weight, float):
            here = array("d", [square, *beside, *row])  # which takes 0-dimensional tensors for numbers too
            if len(here) != len(self._here):
                self._figures = torch.frombuffer(here, dtype=torch.float64)
                self._here = here
            self._here[:], figures = here, self._figures
        else:
            is_there = isinstance(row, Tensor)
            there = torch.stack([self._there(n) for n in (square, *beside, *(() if is_there else row))])
            figures = torch.cat([there, row]) if isinstance(row, Tensor) else there
        return figures, (self._groups.world if self._sharded else self._groups.model).all_reduce(figures)

    def read(self, figures: Tensor) -> list[float]:
        """Return the numbers of a result of `divide`."""
        found: list[float] = self._here.tolist() if figures is self._figures else figures.tolist()
        return found

    def _there(self, number: Tensor | float) -> Tensor:
        """Return a number as a tensor on the device, float64; it may come from the host in a capture, too."""
        if isinstance(number, Tensor):
            return number.to(self._device, torch.float64, non_blocking=True)
        return torch.full((), number, dtype=torch.float64, device=self._device)

    def clip(self, norm: Tensor, threshold: float) -> None:
        """Scale every gradient so that the global norm, which is `norm`, is at most `threshold`."""
        factor = clip_factor(norm, threshold)
        for bucket in self._buckets.all:
            as_real(bucket.shard).mul_(factor)


def clip_factor(norm: Tensor, threshold: float) -> Tensor:
    """Return the factor that brings gradients of this norm to the threshold, at most 1."""
    return torch.clamp(threshold / (norm + CLIP_EPSILON), max=1.0)


class _Share(NamedTuple):
    """A rank's part of a bucket's sums, in real `pieces` to divide, each with the tensors to take the norm of.

    On a CPU, memory is read once for both: pieces fit the cache, and the norm is taken right after the division. There
    the divisor and the norms have memory of their own, which the host reads and writes without torch operations.
    """

    pieces: Sequence[tuple[Tensor, Sequence[tuple[Tensor, Tensor]]]]
    divisor: Tensor
    number: memoryview[float]
    norms: memoryview[float]

    @classmethod
    def from_sums(cls, sums: Tensor, counted: Sequence[Tensor]) -> _Share:
        whole = as_real(sums)  # a complex quotient would change the signs of zeros, see `NO_GRADIENT`
        is_cut = sums.device.type == "cpu" and len(counted) == 1 and counted[0] is sums
        pieces = [(some, (some,)) for some in whole.split(IN_CACHE)] if is_cut else [(whole, tuple(counted))]
        divisor = torch.ones(1, dtype=whole.dtype, device="cpu")
        norms = torch.empty(sum(len(some) for _, some in pieces), dtype=whole.dtype, device="cpu")
        into = iter(norms.unbind())
        bound = [(piece, [(one, next(into)) for one in some]) for piece, some in pieces]
        return cls(bound, divisor, numbers_of(divisor), numbers_of(norms))


def _divide(shares: Sequence[_Share], weight: Tensor | float) -> Tensor | float:
    """Divide the sums, and return the sum of squares of the counted parts: 0-dimensional, float64, or a float."""
    if isinstance(weight, float):  # on the host
        lengths: list[float] = []
        for share in shares:
            share.number[0] = weight
            for piece, counted in share.pieces:
                piece.div_(share.divisor)
                for one, norm in counted:
                    _norm(one, out=norm)
            lengths += share.norms
        if len(lengths) < 2:
            return lengths[0] * lengths[0] if lengths else 0.0
        return torch.frombuffer(array("d", lengths), dtype=torch.float64).square().sum()
    norms: list[Tensor] = []
    for share in shares:
        for piece, counted in share.pieces:
            piece.div_(weight)
            norms += [_norm(one) for one, _ in counted]
    if norms:
        return torch.stack([norm.to(torch.float64) for norm in norms]).square().sum()
    return torch.zeros((), dtype=torch.float64, device=weight.device)


class AbsentGradients:
    """Finds the parameters without any gradient, and sets theirs to None while others are stepped.

    Args:
        buckets: all gradients of this rank's stages.
        masters: the weights that the optimizers step.
        sharded: whether replicas hold shards of the reduced gradients.

    Attributes:
        found: the parameters without a gradient in this step, by stage.
        forget: starts a step, in which none is known to be absent.
    """

    def __init__(self, buckets: GradBuckets, masters: Masters, *, sharded: bool) -> None:
        self._buckets, self._masters, self._sharded = buckets, masters, sharded
        self.found: dict[int, list[nn.Parameter]] = {}
        self.forget = self.found.clear
        device = next((bucket.shard.device for bucket in buckets.all), torch.device("cpu"))
        self._none = torch.zeros((), dtype=torch.float64, device=device) if is_accelerator(device) else 0.0

    def suspects(self) -> Tensor | float:
        """Return the number of parameters that may have no gradient: 0-dimensional, float64, or a number."""
        self.found.clear()
        for bucket in self._buckets.all:
            if bucket.may_lack:
                break
        else:
            return self._none
        firsts = [b.shard.index_select(0, b.firsts) for b in self._buckets.all if b.may_lack and len(b.firsts)]
        return is_untouched(torch.cat(firsts)).sum(dtype=torch.float64) if firsts else self._none

    def find(self) -> None:
        """Find the parameters without a gradient (collective over the replicas where these hold shards)."""
        for bucket in self._buckets.all:
            held = bucket.held()
            untouched = [gradient is None or bool(is_untouched(gradient).all()) for gradient in held]
            if self._sharded:
                everywhere = torch.tensor(untouched, dtype=torch.int64, device=bucket.shard.device)
                bucket.replicas.all_reduce(everywhere, ReduceOp.MIN).wait()
                untouched = [bool(flag) for flag in everywhere.tolist()]
            absent = [p for p, is_absent in zip(bucket.parameters, untouched, strict=True) if is_absent]
            self.found.setdefault(bucket.stage, []).extend(absent)

    def take_away(self, stages: Collection[int]) -> None:
        """Set `.grad` to None for the absent parameters of these stages, until the next step."""
        for stage in stages:
            for parameter in self.found.get(stage, ()):
                master = self._masters.master_of(parameter)
                if master is not None:
                    master.grad = None
