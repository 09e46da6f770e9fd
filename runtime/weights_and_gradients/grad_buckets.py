"""Gradient buckets: parameters of a stage whose gradients are views of one flat buffer.

    parameters of a stage, last layer first     p9 p8 p7 │ p6 p5 │ p4 … p0        buckets of at most 25 MB
    their gradients are views into              [bucket 0][ b. 1 ][ bucket 2 ]

The plan has a few buckets per stage (`PlanBucket`), since it does not know the model; here each is divided further by
bytes. Gradients that are reduced separately have buckets of their own: weights that several stages hold, partial sums
over tp, and the experts of ep, which are a plan bucket behind the others. Where full gradients are resident for a short
time only, so have weights with deferred gradients (the second half of a backward): theirs need not be resident
earlier.

    all replicas alike    backwards ─▶ [   full gradients   ] ─ all-reduce ─▶ the sum, in place
    ZeRO, stage 1         backwards ─▶ [   full gradients   ] ─ reduce-scatter once ─▶ shard of the sum, in place
    stages 2, 3           backward  ─▶ [   full gradients   ] ─ reduce-scatter ─▶ added to the shard, then freed
                          backward  ─▶ [   full gradients   ] ─ …

Full gradients of stages 2 and 3 are resident from a backward to the end of its reduction, the shard of their sum from
the first reduction of a step to the optimizer's step. The next backward or gather of weights on this rank waits for a
reduction's end: others reuse the memory. A gradient of the first half of a split backward allocates its bucket itself.
Where gradients are partial sums over tp, shards are all-reduced over tp at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from operator import attrgetter, eq, itemgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..autograd.deferred_weight_grads import queue_of
from ..blocks.dtensor import comes_summed, local_of
from ..blocks.dtype_names import is_low
from ..comm import Group, Work
from ..parallel.expert.moe import expert_weights
from ..parallel.mesh_groups import MeshGroups
from ..stage.build_stages import Stage
from .flat_buffer_offsets import FlatLayout
from .losses_in_gradient_buckets import Room, room_for
from .master_weights import Masters
from .resident_weight_bytes import MemoryKind, MemoryStats, ResizableStorage

WaitForWorks = Callable[[Iterable[Work]], None]
"""Waits for works with other ranks."""

_GRAD, VERSION = attrgetter("grad"), attrgetter("_version")

IN_CACHE = 2**16
"""Count of numbers that fit into a core's cache."""

NO_GRADIENT = -0.0
"""Marks a missing gradient: it adds nothing, and stays -0.0 in sums, but adding a gradient of zeros makes it +0.0."""


class PlanBucket(NamedTuple):
    """A bucket as the plan numbers them: a stage, and a number within it."""

    stage: int
    number: int


class ArrivedParameters(list[Tensor]):
    """Parameters that backwards have come to; as a hook on a parameter, adds it, without a call of Python."""

    __call__ = list.append


class GradBucket:
    """Gradients of some parameters of a stage, as views of one flat buffer, in float32 for shorter dtypes.

    Args:
        masters: the weights that the optimizer steps.
        layout: offsets of gradients, and this rank's shard of their sum; None: contiguous, and it keeps all of it.
        reshards: whether full gradients are freed after each reduce-scatter.
        has_room: whether figures of the step may be piggybacked on the reduction.
        stats: counts resident bytes.

    Attributes:
        plan_bucket: the plan's bucket that it belongs to; `stage` is that bucket's stage.
        flat: the full gradients.
        shard: this rank's part of their sum over replicas: in the same memory, unless full gradients are freed.
        given: what the optimizer steps, and the views that become its `.grad`.
        views: the gradient of each parameter, as a view of the flat buffer; `pairs` are (parameter, view).
        room: the space for figures that are piggybacked on its reduction.
        comes_summed: whether PyTorch reduces these gradients itself.
        begins_at_zero: whether a step starts with zeros, which backwards add to; else the first gradient is copied,
            which saves a large bucket one read and write.
        adds_in_place: whether backwards add to the views themselves, from the first of a step on.
        blank: parameters without a gradient so far in this step, whose views are uninitialized. Not maintained where
            the bucket begins at zero; there version counters of views tell, when the gradients are read.
        arrived: parameters that a backward has come to, whose gradients `hooks_that_fill_buckets` is still to take in.
        own, kept: ids of the views, and of those that can be the `.grad` of their parameters.
        missing: parameters whose gradient from the last backward has not come yet.
        notes_arrivals: whether complete gradients are recorded: from a stage's last backward on.
        ready: whether the bucket may be launched.
        is_open: whether backwards fill it, as in a step; gradients of the caller's own backwards are not taken.
        may_lack: whether some parameter of the shard may have no gradient in this step.
        reshards: whether full gradients are resident only from a backward to their reduction.
        firsts: offsets in the shard of the first number of each parameter that has a part in it.
        replicas: the group over which it is summed.
    """

    blank: set[Tensor]
    missing: set[Tensor]
    replicas: Group
    _versions: list[int] | None
    _is_begun: bool

    def __init__(
        self,
        plan_bucket: PlanBucket,
        parameters: Sequence[nn.Parameter],
        masters: Masters,
        *,
        layout: FlatLayout | None = None,
        reshards: bool = False,
        has_room: bool = False,
        stats: MemoryStats | None = None,
    ) -> None:
        self.plan_bucket, self.stage, self.parameters = plan_bucket, plan_bucket.stage, tuple(parameters)
        self._all, self.comes_summed = frozenset(parameters), comes_summed(parameters[0])
        self.arrived = ArrivedParameters()
        local = [local_of(parameter) for parameter in parameters]
        dtype, device = torch.float32 if is_low(local[0].dtype) else local[0].dtype, local[0].device
        self._is_sharded, self._layout = layout is not None, layout or FlatLayout.sharded(local, multiple=1)
        self.reshards = reshards and self._layout.num_shards > 1
        size = self._layout.size
        self._sent = torch.empty(size + (room_for(dtype) if has_room else 0), dtype=dtype, device=device)
        self.flat = self._layout.zero_gaps(self._sent[:size])
        self.room = Room(self._sent[size:]) if len(self._sent) > size else None
        # `data` gives each view a version counter of its own, which shows whether anything was added
        self.views = [view.data for view in self._layout.views(self.flat)]
        self.pairs = tuple(zip(self.parameters, self.views, strict=True))
        self.own = frozenset(map(id, self.views))
        self._addresses = [*map(Tensor.data_ptr, self.views)]
        self._reduced = self._layout.shard(self.flat)
        self.shard = torch.empty_like(self._reduced) if self.reshards else self._reduced
        self.firsts = torch.tensor([s.at for s in self._layout.segments() if s], dtype=torch.int64, device=device)
        stats = stats or MemoryStats()
        self._storage = ResizableStorage(self.flat, MemoryKind.GRADIENTS, stats)
        self._sum: ResizableStorage | None = None
        pairs = zip(map(masters.master_of, parameters), self.held(), strict=True)
        self.given = [(stepped, view) for stepped, view in pairs if stepped is not None and view is not None]
        self.clear()
        if self.reshards:
            self._sum = ResizableStorage(self.shard, MemoryKind.GRADIENTS, stats)
        self.kept = frozenset([id(view) for parameter, view in self.pairs if can_be_grad(view, parameter)])
        keeps_views = len(self.kept) == len(self.views)
        self.begins_at_zero = not self.reshards and (size <= IN_CACHE if keeps_views else is_low(local[0].dtype))
        self.adds_in_place = self.begins_at_zero and keeps_views
        for parameter in parameters:
            parameter.grad = None
        if self.reshards:
            self._free_full()

    def attach(self) -> None:
        """Prepare parameters for the first backward of a step, whatever was done to them between steps.

        `Module.to`, for example, moves gradients to other memory.
        """
        self.is_open = True
        self.arrived.clear()
        if not self.reshards and [*map(Tensor.data_ptr, self.views)] != self._addresses:
            for view, own in zip(self.views, self._layout.views(self.flat), strict=True):
                view.data = own.data
        if self.begins_at_zero and self._versions is None:
            self.flat.zero_()
            self._versions = list(map(VERSION, self.views))
        for parameter, view in self.pairs:
            if not self.adds_in_place:
                parameter.grad = None
            elif parameter.grad is not view:
                parameter.grad = view

    def add_gradient(self, parameter: Tensor, view: Tensor, gradient: Tensor) -> None:
        """Add to a parameter's gradient, which is this view; the first of a step is copied where there are no zeros."""
        if self.begins_at_zero or parameter not in self.blank:
            view.add_(gradient)
            return
        self.blank.discard(parameter)
        if gradient.layout is torch.strided:
            torch.add(gradient, 0.0, out=view)  # turns -0.0 of a gradient into +0.0, see `NO_GRADIENT`
        else:
            view.zero_().add_(gradient)

    def fill(self) -> None:
        """Set missing gradients to `NO_GRADIENT`, before all are read together."""
        if not self.blank or not self._storage.is_resident:
            return
        if self._versions is not None and not any(map(eq, map(VERSION, self.views), self._versions)):
            self.blank.clear()  # all have come
            return
        for number, (parameter, view) in enumerate(self.pairs):
            came = self._versions is not None and view._version != self._versions[number]
            if not came and parameter in self.blank:
                view.fill_(NO_GRADIENT)
                self.may_lack = True
        self.blank.clear()

    def give(self) -> None:
        """Set `.grad` of everything that the optimizer steps to its view."""
        for stepped, view in self.given:
            if stepped.grad is not view:
                stepped.grad = view

    def allocate_full(self) -> None:
        """Allocate full gradients, where they are not resident; nothing has been added to them."""
        if not self._storage.is_resident:
            self._storage.allocate()
            self._layout.zero_gaps(self.flat)
            self.blank = set(self.parameters)

    def reduce(self) -> Work:
        """Start to reduce the accumulated gradients over replicas: to shards, or whole with piggybacked figures."""
        if not self._is_sharded:
            return self.replicas.all_reduce(self._sent)
        self.allocate_full()
        self.fill()
        return self.replicas.reduce_scatter(self._reduced, self.flat)

    def finish_reduction(self) -> None:
        """Add the result of a reduce-scatter to the shard, which the first of a step allocates; free full gradients."""
        if not self.begin_sum(self._reduced):
            self.shard.add_(self._reduced)
        self._free_full()

    def begin_sum(self, first: Tensor | None = None) -> bool:
        """Allocate the shard of the step's sum and set it to its first part; None: no gradient. False: it is begun."""
        if self._sum is None or self._is_begun:
            return False
        self._is_begun = True
        self._sum.allocate()
        if first is None:
            self.shard.fill_(NO_GRADIENT)
        else:
            self.shard.copy_(first)
        return True

    def counted(self, counts: Sequence[bool]) -> list[Tensor]:
        """Return the shard's parts of those parameters that count in the norm; the whole shard where all do."""
        if all(counts):
            return [self.shard]
        return [view for view, here in zip(self.held(), counts, strict=True) if here and view is not None]

    def clear(self, *, afresh: bool = False) -> None:
        """Reset for the next step; `afresh` also zeroes gaps, which may have become NaN."""
        self.blank, self.missing, self.ready = set(self._all), set(self._all), False
        self.may_lack, self.is_open, self.notes_arrivals = self.reshards, False, False
        self._versions, self._is_begun = None, False
        for parameter in self.parameters if self._layout.num_shards > 1 else ():
            parameter.grad = None  # outside of its shard, it would be of this replica alone, and undivided
        if self._sum is not None:
            for stepped, _ in self.given:
                stepped.grad = None
            self._sum.free()
        elif afresh and self._is_sharded:
            self._layout.zero_gaps(self.flat)

    def held(self) -> list[Tensor | None]:
        """Return each parameter's gradient as far as this rank's shard has it; None where it has none of it."""
        return self._layout.held(self.shard) if self._is_sharded else list(self.views)

    def _free_full(self) -> None:
        self.attach()
        self._storage.free()


def as_real(tensor: Tensor) -> Tensor:
    """Return a view as real numbers: two for a complex one, in a last dimension."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def is_untouched(gradient: Tensor) -> Tensor:
    """Return a mask of numbers without a gradient (-0.0); for a complex number, by its real part."""
    part = gradient.real if gradient.is_complex() else gradient
    return (part == 0).logical_and_(part.signbit())


def can_be_grad(view: Tensor, parameter: Tensor) -> bool:
    """Whether the view can be the parameter's `.grad`, so that backwards add to it."""
    return parameter.dtype == view.dtype and not isinstance(parameter, DTensor)


class GradBuckets:
    """All gradient buckets of a rank's stages, and the replicas that each is reduced over.

    Args:
        buckets: in the order of `cut_buckets`, stage by stage.
        stages: this rank's stages.
        groups: the groups of the mesh.
        first_expert_bucket: the number of the experts' plan bucket, in each stage.

    Attributes:
        all: the buckets, grouped by plan bucket.
    """

    def __init__(
        self,
        buckets: Sequence[GradBucket],
        stages: Mapping[int, Stage],
        groups: MeshGroups,
        *,
        first_expert_bucket: int,
    ) -> None:
        self._first_expert_bucket = first_expert_bucket
        self.of_plan: dict[PlanBucket, list[GradBucket]] = {}
        self.home: dict[nn.Parameter, tuple[GradBucket, Tensor]] = {}
        """The bucket of each parameter, and its gradient's view there."""
        for bucket in buckets:
            self.of_plan.setdefault(bucket.plan_bucket, []).append(bucket)
            self.home.update({parameter: (bucket, view) for parameter, view in bucket.pairs})
        self.all = [bucket for some in self.of_plan.values() for bucket in some]
        for bucket in self.all:
            bucket.replicas = groups.expert_replicas if self.is_of_experts(bucket) else groups.replicas
        partial_sums = {parameter for stage in stages.values() for parameter in stage.partial}
        self.partial_sums = [b for b in self.all if not partial_sums.isdisjoint(b.parameters)]
        """Buckets whose gradients are partial sums over tp."""

    def of_stages(self, stages: Collection[int]) -> list[GradBucket]:
        """Return the buckets of these stages."""
        return [bucket for bucket in self.all if bucket.stage in stages]

    def is_of_experts(self, bucket: GradBucket) -> bool:
        """Whether a bucket holds experts that are sharded over ep."""
        return bucket.plan_bucket.number >= self._first_expert_bucket


def cut_buckets(
    stage: Stage,
    buckets_per_stage: int,
    bucket_bytes: int,
    apart: Collection[nn.Parameter] = (),
    *,
    waiting_apart: bool = False,
    whole: Collection[nn.Parameter] = (),
    whole_bytes: int = 0,
) -> list[tuple[PlanBucket, list[nn.Parameter]]]:
    """Divide a stage's parameters, last first, into the plan's buckets, of equal size, and these by bytes and dtype.

    After them come those with partial sums, then those to be reduced `apart`, one bucket each; then, in one more plan
    bucket, the experts that are sharded over ep. With `waiting_apart` no bucket mixes weights with deferred gradients
    and others; nor does one mix parameters that must stay `whole`, in buckets of `whole_bytes`, and others.
    """
    found, experts = list(stage.named_weights().values()), expert_weights(stage)
    alone = [parameter for parameter in found if parameter in apart]
    rest = [parameter for parameter in reversed(found) if parameter not in apart]
    dense = [parameter for parameter in rest if parameter not in stage.partial and parameter not in experts]
    partial_sums = [parameter for parameter in rest if parameter in stage.partial]
    of_experts = [parameter for parameter in rest if parameter in experts]
    last = buckets_per_stage - 1

    def cut(parameters: list[nn.Parameter], number: int) -> Iterator[tuple[int, list[nn.Parameter]]]:
        waiting = {p for p in parameters if waiting_apart and queue_of(p) is not None}
        for waits, stays in product((False, True), (False, True)):
            group = [p for p in parameters if (p in waiting) is waits and (p in whole) is stays]
            yield from _cut_evenly(group, number, whole_bytes if stays else bucket_bytes)

    buckets = [
        *sorted(cut(dense, buckets_per_stage), key=itemgetter(0)),
        *((last, bucket) for _, bucket in cut(partial_sums, 1)),
        *((last, [parameter]) for parameter in alone),
        *((buckets_per_stage, bucket) for _, bucket in cut(of_experts, 1)),
    ]
    return [(PlanBucket(stage.index, number), bucket) for number, bucket in buckets]


def _cut_evenly(
    parameters: Sequence[nn.Parameter], num_plan_buckets: int, bucket_bytes: int
) -> list[tuple[int, list[nn.Parameter]]]:
    """Return (number of the plan bucket, parameters) for each bucket, in order."""
    total = sum(p.numel() for p in parameters)
    buckets: list[tuple[int, list[nn.Parameter]]] = []
    collected: list[nn.Parameter] = []
    done = number = 0

    def close() -> None:
        if collected:
            buckets.append((number, [*collected]))
            collected.clear()

    for parameter in parameters:
        is_full = sum(local_of(p).nbytes for p in (*collected, parameter)) > bucket_bytes
        if collected and (is_full or _kind(collected[0]) != _kind(parameter)):
            close()
        collected.append(parameter)
        done += parameter.numel()
        if number < num_plan_buckets - 1 and done * num_plan_buckets >= total * (number + 1):
            close()
            number += 1
    close()
    return buckets


def _kind(parameter: nn.Parameter) -> tuple[torch.dtype, bool]:
    """Return the properties that the parameters of a bucket share: dtype, and whether PyTorch reduces them."""
    return parameter.dtype, comes_summed(parameter)
