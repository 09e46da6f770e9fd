"""Sums of gradients that are not reductions over replicas: what several stages hold, and partial sums over tp.

    tied weight    stage 0 ─┐           twins    stage 0 (route 0) ─┐         partial sums    tp rank 0 ─┐
                            ├─ sum                                  ├─ sum                               ├─ sum
                   stage 3 ─┘                    stage 3 (route 1) ─┘                         tp rank 1 ─┘

They are begun and not waited for: the program goes on until a bucket is to be reduced.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from torch import Tensor, nn

from ..comm import Work
from ..parallel.mesh_groups import MeshGroups, Sharing
from ..stage.tied_weights import TiedWeights
from .grad_buckets import GradBuckets, Wait


class GradSums:
    """The sums of one rank that are under way.

    Args:
        buckets: all gradients of this rank's stages.
        groups: the groups of the mesh.
        tied: weights that several stages hold.
        sharded: whether replicas hold shards of what is reduced: then partial sums are added up at the end of the step,
            when there is less of them.
    """

    def __init__(self, buckets: GradBuckets, groups: MeshGroups, tied: TiedWeights, *, sharded: bool) -> None:
        self._buckets, self._groups, self._tied, self._sharded = buckets, groups, tied, sharded
        self._under_way: list[_Sum] = []
        self.accumulates = False
        """Whether the step's gradients are added to by the next one, which adds up copies then."""

    @property
    def known(self) -> Container[nn.Parameter]:
        """The parameters whose gradients are summed."""
        return self._buckets.home

    def has_partial_sums(self, stage: int) -> bool:
        """Whether a stage's last backward leaves partial sums on the ranks of tp that are added up at once."""
        return not self._sharded and any(bucket.stage == stage for bucket in self._buckets.partial_sums)

    def add_partial_sums(self, stage: int) -> None:
        """Begin to add up the partial sums of a stage over the ranks of tp."""
        for bucket in self._buckets.partial_sums:
            if bucket.stage == stage and not self.accumulates:
                bucket.fill()
                self._under_way.append(_Sum([bucket.flat], self._groups.tensor.all_reduce(bucket.flat)))

    def add_tied(self, params: str, stages: tuple[int, ...]) -> None:
        """Begin to sum the gradients of what several stages hold: all weights of twins ("stage"), or a named one."""
        if self._buckets.partial_sums:
            self.end()  # what is tied has to be whole
        sharing = self._groups.sharing.get(stages)
        if params == "stage":
            buckets = self._buckets.of_stages(stages)
            copies = [[bucket.flat] for bucket in buckets]
        else:
            homes = [self._buckets.home[parameter] for parameter in self._tied.copies(params)]
            buckets = [bucket for bucket, _ in homes]
            copies = [[view for _, view in homes]] if homes else []
        if self.accumulates and not any(bucket.reshards for bucket in buckets):
            return
        for bucket in buckets:
            bucket.fill()
        self._under_way += _begin_sums(copies, sharing)

    def end(self) -> None:
        """Wait for the sums that were begun."""
        for sum_ in self._under_way:
            sum_.end()
        self._under_way.clear()

    def complete(self, wait: Wait) -> None:
        """Add up the partial sums of a step that are left: those of shards, which have been reduced."""
        if self._sharded:
            tensor = self._groups.tensor
            wait([tensor.all_reduce(bucket.shard) for bucket in self._buckets.partial_sums])


class _Sum:
    """Tensors, here and on other ranks, that are becoming their sum."""

    def __init__(self, copies: Sequence[Tensor], work: Work | None) -> None:
        self._copies = copies
        self._work = work

    def end(self) -> None:
        """Wait, and let all tensors here be the sum."""
        if self._work is not None:
            self._work.wait()
        for other in self._copies[1:]:
            other.copy_(self._copies[0])


def _begin_sums(copies: Sequence[Sequence[Tensor]], sharing: Sharing | None) -> list[_Sum]:
    """Begin to sum the tensors of each list with each other, and with those of the ranks that hold copies."""
    sums = []
    for here in copies:
        for other in here[1:]:
            here[0].add_(other)
        sums.append(_Sum(here, sharing.group.all_reduce(here[0]) if sharing else None))
    return sums
