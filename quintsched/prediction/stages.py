"""Which layers each pipeline rank holds, as counts: the same for all strategies of one (pp, chunks, split, recompute).

    pp=4, 10 layers      rank 0         1        2        3
                     embedding 3        3        2      2 head       ranks that hold the same are counted once

Most layouts have two to four kinds of ranks, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quintsched.descriptions.model import Model
from quintsched.descriptions.strategy import Recompute
from quintsched.prediction.operators import Array

V_SHAPED = frozenset({"zbv", "v-half", "v-min", "dualpipe-v"})
"""Schedules whose second chunk runs back over the ranks."""
BIDIRECTIONAL = frozenset({"dualpipe"})
"""Schedules in which a rank holds its stage's twin too."""


@dataclass(frozen=True)
class Layout:
    """What decides which layers a rank holds."""

    pp: int
    chunks: int
    schedule: str
    stages: tuple[int, ...] | None
    recompute: Recompute


@dataclass(frozen=True)
class RankKind:
    """What one or more pipeline ranks hold."""

    dense: int
    mixture: int
    full_dense: int
    """Of those, how many run their forward again."""
    full_mixture: int
    first: int
    """1 with the embedding."""
    last: int
    """1 with the head."""


@dataclass(frozen=True, eq=False)
class Kinds:
    """The kinds of ranks of L layouts, each array of shape (L, K), K the most kinds that one has."""

    dense: NDArray[np.float64]
    mixture: NDArray[np.float64]
    full_dense: NDArray[np.float64]
    full_mixture: NDArray[np.float64]
    first: NDArray[np.float64]
    last: NDArray[np.float64]
    ranks: NDArray[np.float64]
    """How many ranks are of the kind; 0 pads."""
    rank: NDArray[np.float64]
    """The first rank of the kind."""

    def take(self, index: NDArray[np.int64]) -> Kinds:
        """Return the kinds of these layouts."""
        return Kinds(**{name: values[index] for name, values in vars(self).items()})


@dataclass(frozen=True, eq=False)
class PerMicrobatch:
    """What a rank of each kind does for one microbatch, in seconds; arrays (n, K)."""

    compute_forward: Array
    compute_input: Array
    compute_weight: Array
    recompute: Array
    tp_forward: Array
    tp_backward: Array
    tp_hidden: Array
    cp: Array
    cp_hidden: Array
    ep: Array
    pp: Array
    dp: Array
    """Of gathers and reduce-scatters in every microbatch, what computation does not hide."""
    dp_hidden: Array
    weights: Array
    expert_weights: Array

    @property
    def forward(self) -> Array:
        """Half of what is waited for counts here."""
        return self.compute_forward + self.tp_forward + (self.cp + self.ep + self.pp + self.dp) / 2

    @property
    def backward_input(self) -> Array:
        """With what is run again before it."""
        waits = self.tp_backward + (self.cp + self.ep + self.pp + self.dp) / 2
        return self.compute_input + self.recompute + waits

    @property
    def total(self) -> Array:
        """Forward and backward."""
        return self.forward + self.backward_input + self.compute_weight


def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage, as even as can be, what is left over going to the first."""
    least, over = divmod(layers, stages)
    return tuple(least + (stage < over) for stage in range(stages))


def stages_of_rank(rank: int, pp: int, chunks: int, schedule: str) -> tuple[int, ...]:
    """Return the stages that a pipeline rank holds."""
    if schedule in V_SHAPED:
        return (rank, 2 * pp - 1 - rank)
    if schedule in BIDIRECTIONAL:
        return (rank, pp - 1 - rank)
    return tuple(range(rank, pp * chunks, pp))


def rank_kinds(model: Model, layout: Layout) -> list[RankKind]:
    """Return what each pipeline rank holds."""
    count = layout.pp * layout.chunks
    layers = layout.stages or stage_layers(model.layers, count)
    full = _recomputed(layers, layout.recompute)
    starts = np.concatenate(([0], np.cumsum(layers)))
    stages = []
    for stage in range(count):
        mixed = [has_experts(model, layer) for layer in range(starts[stage], starts[stage + 1])]
        again = mixed[: full[stage]]
        stages.append(
            (len(mixed) - sum(mixed), sum(mixed), len(again) - sum(again), sum(again), stage == 0, stage == count - 1)
        )
    found = []
    for rank in range(layout.pp):
        own = [stages[stage] for stage in stages_of_rank(rank, layout.pp, layout.chunks, layout.schedule)]
        found.append(RankKind(*(int(sum(column)) for column in zip(*own, strict=True))))
    return found


def has_experts(model: Model, layer: int) -> bool:
    """Whether a layer has a mixture of experts."""
    experts = model.experts
    return (
        experts is not None and layer >= experts.first_dense and (layer - experts.first_dense + 1) % experts.every == 0
    )


def kinds(model: Model, layouts: Sequence[Layout], *, each_rank: bool = False) -> Kinds:
    """Return the kinds of ranks of several layouts; `each_rank`: every rank is one, whatever it holds."""
    columns: list[list[tuple[float, ...]]] = []
    for layout in layouts:
        ranks_of: dict[tuple[RankKind, int], list[int]] = {}
        for rank, kind in enumerate(rank_kinds(model, layout)):
            ranks_of.setdefault((kind, rank * each_rank), []).append(rank)
        columns.append([(*vars(kind).values(), len(ranks), ranks[0]) for (kind, _), ranks in ranks_of.items()])
    most = max(len(column) for column in columns)
    padding = (0.0,) * 8
    table = np.array([column + [padding] * (most - len(column)) for column in columns], dtype=np.float64)
    return Kinds(*(table[:, :, index] for index in range(8)))


def _recomputed(layers: Sequence[int], recompute: Recompute) -> list[int]:
    """How many layers of each stage run their forward again."""
    if recompute == "full":
        return list(layers)
    if isinstance(recompute, tuple):
        return [min(count, asked) for count, asked in zip(layers, recompute, strict=True)]
    if isinstance(recompute, int):
        return [min(count, recompute) for count in layers]
    return [0] * len(layers)
