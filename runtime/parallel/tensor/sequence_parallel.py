"""Sequence parallelism: between the column/row pairs of a block, each rank of tp has a slice of the tokens.

    embedding ──▶ (B,S,D) ─▷ scatter ─▶ (B,S/tp,D) ─▶ norm ─▷ gather ─▶ column … row ─▷ reduce-scatter ─▶ (B,S/tp,D) …
                                        └──────────────────── block ────────────────────────────────┘
    … block ──▶ (B,S/tp,D) ─▷ gather ─▶ (B,S,D) ─▶ head

Work that tensor parallelism alone replicates (norms, dropout, residuals) is divided over the ranks, and so are its
saved activations and the messages between stages. The volume of communication stays: an all-reduce is a
reduce-scatter and an all-gather (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models", section 4.2.2). A block takes a slice if it has pairs; the others (an embedding, a head) take whole tokens.

Outside of its pairs a block must be tokenwise, along dimension 1. The gradient of a parameter there is computed from a
slice of the tokens, so it is a partial sum: after a stage's last backward the ranks all-reduce it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from quintsched.errors import MisfitError

from ...blocks.block_builders import TOKENS_DIM, Carry, Parcel, split_result
from ...blocks.trees import TensorSpec, TreeSpec
from ...comm import Group
from ...comm.autograd_collectives import Collective, gather_from_group, scatter_to_group
from ..expert.moe import mixtures
from .parameter_shards import shard_of


class SequenceParallel:
    """Map of the blocks whose activations are this rank's slice of the tokens.

    Args:
        has_pairs: whether each block has column/row pairs.
        group: the ranks of tp; None: tokens are not sliced.
    """

    def __init__(self, has_pairs: Sequence[bool], group: Group | None) -> None:
        self._group = None if group is None or group.size == 1 else group
        self._inside = [self._group is not None and has for has in has_pairs]

    def inside(self, number: int) -> bool:
        """Whether block `number` takes this rank's slice of the tokens."""
        return self._inside[number]

    def group_of(self, number: int) -> Group | None:
        """Return the group over which the input tokens of block `number` are sliced; None: they are whole."""
        return self._group if self._inside[number] else None

    def leaves_slice(self, number: int) -> bool:
        """Whether a slice is sent from block `number` to the next; before the first and after the last it is not."""
        neighbours = self._inside[number : number + 2]
        return 0 <= number < len(self._inside) - 1 and any(neighbours)

    def parts_before(self, number: int) -> int:
        """Return the number of slices of the tokens that are sent to block `number`; 1: they are whole."""
        return self._group.size if self._group is not None and self.leaves_slice(number - 1) else 1

    def around(self, number: int, block: nn.Module) -> list[nn.Module]:
        """Return a block with the modules that gather or scatter tokens before and behind it, where needed."""
        if self._group is None:
            return [block]
        inside, given, left = self._inside[number], self.leaves_slice(number - 1), self.leaves_slice(number)
        return [
            *_borders(given, inside, self._group),
            block,
            *_borders(inside, left, self._group),
        ]

    def travelling(self, parcels: Sequence[Parcel]) -> list[Parcel]:
        """Return the specs that a rank sends and stores, from those of whole tokens.

        Riders stay whole. Raises `MisfitError` for tokens that do not divide, and for riders of blocks on slices.
        """
        for number, parcel in enumerate(parcels):
            known = parcels[number - 1].names if number else ()
            fresh = [name for name in parcel.names if name not in known]
            if fresh and self.inside(number):
                raise MisfitError(
                    f"{fresh[0]!r} rides along behind block {number}, which sequence parallelism does not "
                    "slice; run without sequence_parallel"
                )
        return [
            self._slice_of(number, parcel) if self.leaves_slice(number) else parcel
            for number, parcel in enumerate(parcels)
        ]

    def _slice_of(self, number: int, parcel: Parcel) -> Parcel:
        assert self._group is not None
        if not parcel.output.tree.is_tensor:
            raise MisfitError(
                f"block {number} leaves {parcel.output.tree}, and sequence parallelism slices nothing but tensors; run "
                "without sequence_parallel"
            )
        (left,) = parcel.output.tensors
        samples, *rest = left.shape
        if len(rest) < 2 or rest[0] % self._group.size:
            raise MisfitError(
                f"sequence parallelism slices tokens, dimension {TOKENS_DIM}, over tp={self._group.size}, but block "
                f"{number} leaves {left}, which does not divide; choose another length or tp"
            )
        shape = (samples, rest[0] // self._group.size, *rest[1:])
        return replace(parcel, output=TreeSpec.plain(TensorSpec(shape, left.dtype)))


def run_on_slices(block: nn.Module, group: Group | None, given: Any, taken: Mapping[str, Any]) -> Any:
    """Run a block on whole tokens: if it works on slices over a group, scatter its input and gather its output."""
    if group is None:
        return block(given, **taken)
    output, riders, auxiliary = split_result(block(scatter_to_group(given, group, TOKENS_DIM), **taken))
    return Carry(gather_from_group(output, group, TOKENS_DIM), **riders), auxiliary


def partial_weights(block: nn.Module) -> frozenset[nn.Parameter]:
    """Return the weights of a block on slices whose gradients are partial sums on each rank.

    These are all that are not cut, except routers of experts, and experts that are not cut, which see all tokens.
    """
    routed = [child for layer in mixtures(block).values() for child in (layer.router, layer.experts)]
    whole = {parameter for child in routed for parameter in child.parameters()}
    return frozenset(p for p in block.parameters() if shard_of(p) is None and p not in whole)


def _borders(given: bool, wanted: bool, group: Group) -> list[nn.Module]:
    return [] if given == wanted else [_Border(scatter_to_group if wanted else gather_from_group, group)]


class _Border(nn.Module):
    """Move of tokens at a border of whole ones and slices."""

    def __init__(self, move: Collective, group: Group) -> None:
        super().__init__()
        self.move, self.group = move, group

    def forward(self, tokens: Tensor) -> Tensor:
        return self.move(tokens, self.group, TOKENS_DIM)
