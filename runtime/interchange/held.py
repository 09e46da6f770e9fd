"""What a rank holds of the model's tensors, and which of its ranks speaks for each number of them.

    parameter   master (bf16: in float32), or the segment of it that this rank steps (ZeRO), or itself
    buffer      itself

Copies are alike, so of the ranks that hold the same numbers the first one speaks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..blocks.dtensor import comes_summed, counts_here, local_of
from ..blocks.module_state import saved_tensors
from ..parallel.expert.moe import mixtures
from ..parallel.mesh_groups import MeshGroups
from ..parallel.tensor.shard import shard_of
from ..stage.build import Stage
from ..state.master_weights import Masters
from .boxes import Box, Placement


@dataclass(frozen=True)
class HeldTensor:
    """A weight or a buffer as a rank holds it.

    Attributes:
        name: its name in the whole model, "<block>.<name in the block>".
        stage: the stage that it is in.
        tensor: what the block computes with.
        numbers: what training goes on from, of which the block's is rounded or gathered; None where this rank has none.
        placement: where the numbers lie in the full tensor.
        speaks: whether this rank is the one that writes them down.
    """

    name: str
    stage: int
    tensor: Tensor
    numbers: Tensor | None
    placement: Placement
    speaks: bool

    def boxes(self) -> Iterator[Box]:
        """Yield the boxes of the full tensor that this rank holds."""
        if self.numbers is not None:
            yield from self.placement.boxes(self.numbers.detach())


def held_tensors(stages: Mapping[int, Stage], masters: Masters, groups: MeshGroups) -> Iterator[HeldTensor]:
    """Yield the weights and buffers of a rank's stages; one that has several names by each of them."""
    for number, stage in stages.items():
        experts = _of_experts(stage)
        for full_name, tensor in saved_tensors(stage).items():
            name = full_name.removeprefix("blocks.")
            span = None
            numbers: Tensor | None = local_of(tensor)
            if isinstance(tensor, nn.Parameter):
                numbers, span = masters.of(tensor), masters.span_of(tensor)
            replicas = groups.expert_replicas if tensor in experts else groups.replicas
            speaks = (
                numbers is not None and (span is not None or replicas.index == 0) and _first_over_tp(tensor, groups)
            )
            if isinstance(tensor, DTensor) and comes_summed(tensor):
                speaks = counts_here(tensor) and groups.tensor.index == 0
            yield HeldTensor(name, number, tensor, numbers, Placement.of(tensor, span), speaks)


def _first_over_tp(tensor: Tensor, groups: MeshGroups) -> bool:
    if isinstance(tensor, DTensor):
        return counts_here(tensor)
    return shard_of(tensor) is not None or groups.tensor.index == 0


class _Identities(set[int]):
    """Tensors, told apart by which they are."""

    def __contains__(self, tensor: object) -> bool:
        return super().__contains__(id(tensor))


def _of_experts(stage: nn.Module) -> _Identities:
    """Return the tensors of experts that ranks along ep do not have in common."""
    shared_out = [layer for layer in mixtures(stage).values() if layer.group.size > 1]
    return _Identities(id(tensor) for layer in shared_out for tensor in saved_tensors(layer.experts).values())
