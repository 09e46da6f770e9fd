"""Weights that replicas share out (ZeRO): each keeps, and steps, its own share of every piece.

    one piece, four replicas     stage 1, 2                        stage 3
    weights                      whole: parameters look into it    whole from GatherParams to FreeParams
                                 [ 0 │ 1 │ 2 │ 3 ]                 [ · │ · │ · │ · ]
    own share (of replica 2)             └ 2 ┘ in place                   [ 2 ] apart
    optimizer                    steps the segments of parameters in the own share; of bf16, float32 masters of them
    AllGatherBucket              everybody's stepped shares        (none)

Stage 1 shares out the optimizer's state, stage 2 gradients too (`zero_gradients`), stage 3 weights too. A segment is a
parameter of one dimension that goes by the name of the one it is part of, so an optimizer may group them by name, but
not look at shapes. Where a piece has no replicas, the own share is all of it, and it stands.

A parameter whose weights do not stand shows not-a-number everywhere, and takes no memory.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models". Dropping a
tensor's memory under autograd's feet is how PyTorch's FSDP does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError
from quintsched.plan import Plan

from ..blocks.dtensor import is_sharded
from ..comm import Group, Work
from ..stage.build import Stage
from .flat_buffer import FlatLayout
from .grad_buckets import Bucket
from .grad_reducer import Wait
from .master_weights import Masters, is_low
from .memory_stats import Held, Ledger, Room


class WeightShare:
    """The weights of one piece: some parameters of one stage and one type.

    Args:
        bucket: stage and number of the bucket that the piece belongs to.
        parameters: they become views into one flat tensor.
        group: the replicas of this piece.
        comes_and_goes: whether whole weights stand only while they are used.
        ledger: counts what stands.
    """

    def __init__(
        self, bucket: Bucket, parameters: Sequence[nn.Parameter], group: Group, *, comes_and_goes: bool, ledger: Ledger
    ) -> None:
        self.bucket = bucket
        self.parameters = tuple(parameters)
        self.layout = FlatLayout.shared(parameters, group.size, group.index)
        self._group = group
        self._goes = comes_and_goes and group.size > 1
        first = parameters[0]
        self.whole = torch.zeros(self.layout.size, dtype=first.dtype, device=first.device)
        self._views = self.layout.views(self.whole)
        with torch.no_grad():
            for view, parameter in zip(self._views, parameters, strict=True):
                view.copy_(parameter)
        self._room = Room(self.whole, Held.WEIGHTS, ledger)
        self.own = self.layout.own(self.whole)
        if self._goes:
            self.own = self.own.clone()
            Room(self.own, Held.WEIGHTS, ledger)
        self.stepped = self.own.float() if is_low(first.dtype) else self.own
        self.segments = [
            None if found is None else nn.Parameter(self.stepped[found.at : found.at + found.stop - found.start])
            for found in self.layout.segments()
        ]
        self._show()
        self.free()

    def gather(self) -> Work | None:
        """Begin to make the weights whole from everybody's shares; None where they are."""
        if self._group.size == 1:
            return None
        self._room.take()
        self._show()
        return self._group.all_gather(self.whole, self.own)

    def free(self) -> None:
        """Drop the whole weights, where they come and go."""
        if self._goes and self._room.stands:
            for parameter in self.parameters:
                parameter.data = parameter.new_full((), torch.nan).expand_as(parameter)
            self._room.drop()

    def _show(self) -> None:
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view


class SharedMasters(Masters):
    """What the optimizer works on: segments of parameters, of short types in float32."""

    def __init__(self, shares: Sequence[WeightShare], stages: Mapping[int, Stage]) -> None:
        super().__init__({})
        self._pairs = {stage: ([], []) for stage in stages}
        self._within: dict[nn.Parameter, slice] = {}
        for share in shares:
            if share.stepped is not share.own:
                low, high = self._pairs[share.bucket[0]]
                low.append(share.own)
                high.append(share.stepped)
            for parameter, master, found in zip(share.parameters, share.segments, share.layout.segments(), strict=True):
                self._of[parameter] = master
                if found is not None:
                    self._within[parameter] = slice(found.start, found.stop)

    def load(self, parameter: nn.Parameter, found: Tensor) -> None:
        """Keep what the own share has of the numbers that a parameter is to have."""
        master = self._of.get(parameter, parameter)
        if master is parameter:
            super().load(parameter, found)
        elif master is not None:
            master.copy_(found.flatten()[self._within[parameter]])


class SharedWeights:
    """All weights of a rank's stages that replicas share out; `wait` before they are read."""

    def __init__(self, shares: Sequence[WeightShare], *, come_and_go: bool) -> None:
        self._come_and_go = come_and_go
        self._of_stage: dict[int, list[WeightShare]] = {}
        for share in shares:
            self._of_stage.setdefault(share.bucket[0], []).append(share)
        self._under_way: dict[int, list[Work]] = {}

    def whole_tensors(self) -> list[Tensor]:
        """Return the flat tensors that whole weights look into, also where they do not stand."""
        return [share.whole for shares in self._of_stage.values() for share in shares]

    def gather(self, stage: int, bucket: int | None = None) -> None:
        """Begin to make the weights of a stage, or of one of its buckets, whole."""
        for share in self._of_stage.get(stage, ()):
            work = share.gather() if bucket is None or share.bucket[1] == bucket else None
            if work is not None:
                self._under_way.setdefault(stage, []).append(work)

    def wait(self, stage: int, wait: Wait) -> None:
        """Wait until the weights of a stage are whole, if they are on their way."""
        works = self._under_way.pop(stage, None)
        if works:
            wait(works)

    def free(self, stage: int, wait: Wait) -> None:
        """Drop a stage's whole weights."""
        self.wait(stage, wait)
        for share in self._of_stage.get(stage, ()):
            share.free()

    def settle(self) -> None:
        """Wait for all that is on its way."""
        for stage in list(self._under_way):
            self.wait(stage, wait_for)

    def spread(self) -> None:
        """Make weights whole again after somebody wrote to their shares (collective over replicas)."""
        if not self._come_and_go:
            for stage in self._of_stage:
                self.gather(stage)
            self.settle()

    @contextmanager
    def whole(self, stage: int) -> Iterator[None]:
        """A context in which the weights of a stage stand (collective over replicas)."""
        self.settle()
        if self._come_and_go:
            self.gather(stage)
            self.settle()
        try:
            yield
        finally:
            if self._come_and_go:
                self.free(stage, wait_for)


def wait_for(works: Iterable[Work]) -> None:
    """Wait, and tell nobody."""
    for work in works:
        work.wait()


def require_shareable(plan: Plan, stages: Mapping[int, Stage]) -> None:
    """Raise `MisfitError` for modules that PyTorch has sharded: their weights cannot be cut once more."""
    for stage in stages.values():
        for number, block in stage.blocks.items():
            if is_sharded(block):
                raise MisfitError(
                    f"PyTorch has sharded block {number} (DTensor), whose weights ZeRO-{plan.zero.stage} cannot share "
                    f"out over the replicas of mesh {plan.mesh} once more; compile the plan with zero=0"
                )
