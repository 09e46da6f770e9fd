"""Sharded weights (ZeRO): each replica keeps and steps its shard of every bucket.

    one bucket, four replicas    stage 1, 2                        stage 3
    weights                      full: parameters are its views    full from GatherParams to FreeParams
                                 [ 0 │ 1 │ 2 │ 3 ]                 [ · │ · │ · │ · ]
    shard (of replica 2)                 └ 2 ┘ in place                   [ 2 ] separate
    optimizer                    steps the segments of parameters in the shard; for bf16, their float32 masters
    AllGatherBucket              all-gathers the stepped shards    (none)

Stage 1 shards optimizer state, stage 2 gradients too (`grad_buckets`), stage 3 weights too. A segment is a
one-dimensional parameter. Where an optimizer needs whole parameters, borders cut none: every replica has some of them,
in their shapes. Where a bucket has no replicas, the shard is all of it, and it stays resident.

A parameter whose full weights are not resident is NaN everywhere, and takes no memory.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models". Resizing a
tensor's storage while autograd holds it is the method of PyTorch's FSDP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ..blocks.dtype_names import is_low
from ..comm import Group, Work
from ..parallel.tensor.parameter_shards import mark_shard, shard_of
from ..stage.build_stages import Stage
from .flat_buffer_offsets import FlatLayout
from .grad_buckets import PlanBucket, WaitForWorks
from .master_weights import Masters
from .resident_weight_bytes import MemoryKind, MemoryStats, ResizableStorage


class WeightBucket:
    """The weights of one bucket: parameters of one stage and one dtype, of which this replica keeps a shard.

    Args:
        plan_bucket: the plan's bucket that it belongs to.
        parameters: become views of one flat buffer.
        group: the replicas of these weights.
        reshards: whether full weights are resident only while they are used.
        whole: whether every parameter is in one shard, whole; `at_one_place`: all in the first.
        is_stepped: whether an optimizer works on the shard: of short types, on a float32 copy.
        stats: counts what is resident.

    Attributes:
        nans: the memory of parameters whose full weights are not resident: a number each, which a write changes.
    """

    def __init__(
        self,
        plan_bucket: PlanBucket,
        parameters: Sequence[nn.Parameter],
        group: Group,
        *,
        reshards: bool,
        whole: bool,
        at_one_place: bool,
        is_stepped: bool,
        stats: MemoryStats,
    ) -> None:
        self.plan_bucket = plan_bucket
        self.parameters = tuple(parameters)
        lay_out = partial(FlatLayout.whole, at_one_place=at_one_place) if whole else FlatLayout.sharded
        self.layout = lay_out(parameters, group.size, group.index)
        self._group = group
        self.reshards = reshards and group.size > 1
        first = parameters[0]
        self.full = torch.zeros(self.layout.size, dtype=first.dtype, device=first.device)
        self._views = self.layout.views(self.full)
        with torch.no_grad():
            for view, parameter in zip(self._views, parameters, strict=True):
                view.copy_(parameter)
        self._storage = ResizableStorage(self.full, MemoryKind.WEIGHTS, stats)
        self.shard = self.layout.shard(self.full)
        if self.reshards:
            self.shard = self.shard.clone()
            ResizableStorage(self.shard, MemoryKind.WEIGHTS, stats)
        self.stepped = self.shard.float() if is_stepped and is_low(first.dtype) else self.shard
        self.segments = [None if tensor is None else nn.Parameter(tensor) for tensor in self.layout.held(self.stepped)]
        for parameter, made in zip(parameters, self.segments, strict=True):
            shard = shard_of(parameter)
            if whole and made is not None and shard is not None:
                mark_shard(made, shard)
        for parameter in parameters if self.reshards else ():
            parameter._quintsched_moved = True  # type: ignore[attr-defined]
        self.nans = self.full.new_full((len(parameters) if self.reshards else 0,), torch.nan)
        self._hidden = [nan.expand_as(p) for nan, p in zip(self.nans, parameters, strict=False)]
        self._show()
        self.free()

    def gather(self) -> Work | None:
        """Start to all-gather the full weights from the replicas' shards; None where there is only one."""
        if self._group.size == 1:
            return None
        self._storage.allocate()
        self._show()
        return self._group.all_gather(self.full, self.shard)

    def free(self) -> None:
        """Free the full weights, where they are resident only while they are used."""
        if self.reshards and self._storage.is_resident:
            for parameter, hidden in zip(self.parameters, self._hidden, strict=True):
                parameter.data = hidden
            self._storage.free()

    @torch.no_grad()
    def take_in(self) -> None:
        """Copy parameters that were assigned other memory to their views in the full weights, which are resident."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter)
                parameter.data = view

    def _show(self) -> None:
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view


class ShardedMasters(Masters):
    """Stepped tensors: segments of parameters, in float32 for low-precision dtypes."""

    def __init__(self, buckets: Sequence[WeightBucket], stages: Mapping[int, Stage]) -> None:
        super().__init__({})
        self._nans, self._memory = [bucket.nans for bucket in buckets if bucket.reshards], dict[nn.Parameter, Tensor]()
        self._pairs = {stage: ([], []) for stage in stages}
        self._within: dict[nn.Parameter, tuple[int, int]] = {}
        self._of_stage = {
            stage: [p for bucket in buckets if bucket.plan_bucket.stage == stage for p in bucket.parameters]
            for stage in stages
        }
        for bucket in buckets:
            if bucket.stepped is not bucket.shard:
                low, high = self._pairs[bucket.plan_bucket.stage]
                low.append(bucket.shard)
                high.append(bucket.stepped)
            memory = bucket.nans.split(1) if bucket.reshards else bucket.layout.held(bucket.shard)
            is_stepped = bucket.stepped is bucket.shard and not bucket.reshards
            for parameter, numbers in zip(bucket.parameters, memory, strict=True):
                is_kept = is_stepped and shard_of(parameter) is None  # writes are not lost
                is_none = numbers is None or is_kept or not (bucket.reshards or parameter.is_cpu)
                self._memory[parameter] = bucket.shard[:0] if is_none else numbers
            for parameter, master, segment in zip(
                bucket.parameters, bucket.segments, bucket.layout.segments(), strict=True
            ):
                self._of[parameter] = master
                if segment is not None:
                    self._within[parameter] = (segment.start, segment.stop)
        named = (pair for stage in stages.values() for pair in stage.named_weights().items())
        self._watch(named, in_buffers=True)

    def _memory_of(self, weight: nn.Parameter) -> Tensor:
        return self._memory[weight]

    def changed(self) -> list[tuple[str, bool]]:
        """Return weights that user code has changed: with `.data`, also those that are not resident now."""
        found = super().changed()
        for nan in self._nans if found else ():
            nan.fill_(torch.nan)
        return found

    def publish(self, stages: Sequence[int]) -> None:
        """Publish stepped weights, and bump the version counters of parameters, which user code may read."""
        torch.autograd.graph.increment_version([weight for stage in stages for weight in self._of_stage[stage]])
        super().publish(stages)

    def span_of(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        """Return the range of the flat parameter that this rank steps, [start, stop); None: all, or none."""
        return self._within.get(parameter)


class ShardedWeights:
    """All weights of a rank's stages that are sharded over replicas; `wait_gather` before they are read.

    Without ZeRO it is empty, and every method does nothing.
    """

    def __init__(self, buckets: Sequence[WeightBucket] = (), *, reshards: bool = False) -> None:
        self._reshards = reshards
        self._of_stage: dict[int, list[WeightBucket]] = {}
        for bucket in buckets:
            self._of_stage.setdefault(bucket.plan_bucket.stage, []).append(bucket)
        self._under_way: dict[int, list[Work]] = {}

    def __bool__(self) -> bool:
        """Whether any weights are sharded."""
        return bool(self._of_stage)

    def filled(self) -> list[int]:
        """Return the numbers that each replica steps of parameters assigned whole; [] without such parameters."""
        counts = [
            bucket.layout.filled()
            for buckets in self._of_stage.values()
            for bucket in buckets
            if bucket.layout.is_whole and bucket.layout.num_shards > 1
        ]
        longest = max(map(len, counts), default=0)
        return [sum(count[index] for count in counts if index < len(count)) for index in range(longest)]

    def full_tensors(self) -> list[Tensor]:
        """Return the flat buffers of full weights, also of those that are not resident."""
        return [bucket.full for buckets in self._of_stage.values() for bucket in buckets]

    def gather(self, stage: int, number: int | None = None) -> None:
        """Start to gather the full weights of a stage, or of one of the plan's buckets of it."""
        for bucket in self._of_stage.get(stage, ()):
            work = bucket.gather() if number is None or bucket.plan_bucket.number == number else None
            if work is not None:
                self._under_way.setdefault(stage, []).append(work)

    def wait_gather(self, stage: int, wait: WaitForWorks) -> None:
        """Wait for a pending gather of a stage's weights."""
        works = self._under_way.pop(stage, None)
        if works:
            wait(works)

    def free(self, stage: int, wait: WaitForWorks) -> None:
        """Free a stage's full weights."""
        self.wait_gather(stage, wait)
        for bucket in self._of_stage.get(stage, ()):
            bucket.free()

    def wait_gathers(self) -> None:
        """Wait for all pending gathers."""
        for stage in list(self._under_way):
            self.wait_gather(stage, wait_for)

    @property
    def are_resident(self) -> bool:
        """Whether full weights are resident between steps."""
        return not self._reshards

    @property
    def are_under_way(self) -> bool:
        """Whether a gather is pending."""
        return bool(self._under_way)

    def take_over(self) -> None:
        """Copy user changes of the full weights, which are resident, to shards."""
        self.take_in()
        for bucket in (bucket for buckets in self._of_stage.values() for bucket in buckets):
            bucket.shard.copy_(bucket.layout.shard(bucket.full))

    def take_in(self) -> None:
        """Copy tensors that were assigned to parameters (`parameter.data = tensor`) to the full weights."""
        for bucket in (bucket for buckets in self._of_stage.values() for bucket in buckets):
            bucket.take_in()

    def gather_again(self) -> None:
        """Gather full weights again after a write to shards (collective over replicas)."""
        if not self._reshards:
            for stage in self._of_stage:
                self.gather(stage)
            self.wait_gathers()

    @contextmanager
    def gathered(self, stage: int) -> Iterator[None]:
        """Return a context in which the full weights of a stage are resident (collective over replicas)."""
        self.wait_gathers()
        if self._reshards:
            self.gather(stage)
            self.wait_gathers()
        try:
            yield
        finally:
            if self._reshards:
                self.free(stage, wait_for)


def wait_for(works: Iterable[Work]) -> None:
    """Wait for works, without recording the time."""
    for work in works:
        work.wait()
