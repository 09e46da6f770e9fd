"""Layers of each pipeline rank, as counts: the same for all strategies of one (pp, chunks, split, recompute).

    pp=4, 10 layers      rank 0         1        2        3
                     embedding 3        3        2      2 head       ranks with equal layers are one kind

Most layouts have two to four kinds of ranks, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import RecomputeRule
from quintsched.strategies.descriptions.strategy_validity import stage_layers
from quintsched.strategies.prediction.operators import Array

V_SHAPED = frozenset({"zbv", "v-half", "v-min", "dualpipe-v", "hanayo"})
"""Schedules of which every other chunk runs back over the ranks."""
PAIRED = ("dualpipe", "dualpipe-v")
"""Schedules that pair a forward with another microbatch's backward."""
BIDIRECTIONAL = frozenset({"chimera", "dualpipe"})
"""Schedules in which a rank also holds its stage's twin."""


@dataclass(frozen=True)
class LayerLayout:
    """Settings that determine the layers of each rank."""

    pp: int
    chunks: int
    schedule: str
    stages: tuple[int, ...] | None
    recompute: RecomputeRule


@dataclass(frozen=True)
class RankKind:
    """Layers that one or more pipeline ranks hold, as counts: numbers, or arrays of them."""

    dense: Any
    """Number of layers of the first of `Model.kinds`: without experts, or with a delta net."""
    mixture: Any
    """Number of layers of the second."""
    full_dense: Any
    """Number of those that are fully recomputed."""
    full_mixture: Any
    first: Any
    """1 with the embedding, else 0."""
    last: Any
    """1 with the head, else 0."""


@dataclass(frozen=True, eq=False)
class Kinds(RankKind):
    """Kinds of ranks of L layouts; each array is (L, K), with K the maximum number of kinds per layout."""

    ranks: NDArray[np.float64]
    """Number of ranks of the kind; 0 for padding."""
    rank: NDArray[np.float64]
    """First rank of the kind."""
    alike: NDArray[np.float64]
    """1 if all stages hold the same layers, except for embedding and head, or each rank has one stage; a property of
    the layout, repeated in every column."""

    def take_layouts(self, index: NDArray[np.int64]) -> Kinds:
        """Return the kinds of these layouts; the result is stored kind by kind, contiguous over layouts."""
        return Kinds(**{name: np.take(values.T, index, axis=1).T for name, values in vars(self).items()})


@dataclass(frozen=True, eq=False)
class RankTimes:
    """Times of each kind of rank for one microbatch, in seconds; arrays (n, K)."""

    compute_forward: Array
    compute_input: Array
    compute_weight: Array
    accumulate: Array
    """Adding the gradients to those of earlier microbatches."""
    recompute: Array
    tp_forward: Array
    tp_backward: Array
    tp_hidden: Array
    cp: Array
    cp_hidden: Array
    ep: Array
    ep_hidden: Array
    pp: Array
    pp_hidden: Array
    dp: Array
    """Exposed part of ZeRO's gathers and reduce-scatters in every microbatch."""
    dp_hidden: Array
    weights: Array
    expert_weights: Array

    @property
    def forward(self) -> Array:
        """Forward, with half of the communication that is not split by direction."""
        return self.compute_forward + self.tp_forward + (self.cp + self.ep + self.pp + self.dp) / 2

    @property
    def backward_input(self) -> Array:
        """Input half of the backward, with recomputation and the other half of that communication."""
        waits = self.tp_backward + (self.cp + self.ep + self.pp + self.dp) / 2
        return self.compute_input + self.recompute + waits

    @property
    def backward_weight(self) -> Array:
        """Weight half of the backward."""
        return self.compute_weight + self.accumulate

    @property
    def passes(self) -> tuple[Array, Array, Array]:
        """Forward, and both halves of the backward."""
        return self.forward, self.backward_input, self.backward_weight

    @property
    def total(self) -> Array:
        """Forward and backward together."""
        return self.forward + self.backward_input + self.backward_weight


def stages_of_rank(rank: int, pp: int, chunks: int, schedule: str) -> tuple[int, ...]:
    """Return the stages that a pipeline rank holds."""
    if schedule in V_SHAPED:
        return tuple(pp * chunk + (pp - 1 - rank if chunk % 2 else rank) for chunk in range(chunks))
    if schedule in BIDIRECTIONAL:
        return (rank, pp - 1 - rank)
    return tuple(range(rank, pp * chunks, pp))


def _together(stages: Sequence[RankKind]) -> RankKind:
    """Return the layers of a rank that holds several stages."""
    return RankKind(*(sum(column) for column in zip(*(vars(stage).values() for stage in stages), strict=True)))


def rank_stages(model: Model, layout: LayerLayout) -> list[list[RankKind]]:
    """Return the layers of each stage of each pipeline rank."""
    count = layout.pp * layout.chunks
    layers = layout.stages or stage_layers(model.layers, count)
    full = recomputed_layers(layers, layout.recompute)
    starts, places = np.concatenate(([0], np.cumsum(layers))), model.layer_kinds
    stages = []
    for stage in range(count):
        mixed = places[starts[stage] : starts[stage + 1]]
        again = mixed[: full[stage]]
        own = (len(mixed) - sum(mixed), sum(mixed), len(again) - sum(again), sum(again))
        stages.append(RankKind(*own, int(stage == 0), int(stage == count - 1)))
    held = (stages_of_rank(rank, layout.pp, layout.chunks, layout.schedule) for rank in range(layout.pp))
    return [[stages[stage] for stage in of_rank] for of_rank in held]


@lru_cache(maxsize=2**12)
def layers_of_stages(model: Model, layout: LayerLayout) -> NDArray[np.float64]:
    """Return the layers of each rank's stages, (pp, stages of a rank, 4): of each kind, and recomputed ones of each."""
    held = [[list(vars(stage).values())[:4] for stage in of_rank] for of_rank in rank_stages(model, layout)]
    counts = np.array(held, np.float64)
    return np.concatenate((counts[..., :2] - counts[..., 2:], counts[..., 2:]), axis=-1)


def _alike(layout: LayerLayout, of_ranks: list[list[RankKind]]) -> float:
    """Return 1 if all stages hold the same layers, except for embedding and head, or each rank has one; 0 for twins."""
    several = {(one.dense, one.mixture, one.full_dense, one.full_mixture) for own in of_ranks for one in own}
    return float(layout.schedule not in BIDIRECTIONAL and (layout.chunks == 1 or len(several) == 1))


def kinds(model: Model, layouts: Sequence[LayerLayout], *, each_rank: bool = False) -> Kinds:
    """Return the kinds of ranks of several layouts, as runs of equal ranks; `each_rank`: one kind per rank."""
    columns = [_columns(model, layout, each_rank) for layout in layouts]
    most = max(len(column) for column in columns)
    padding = (0.0,) * len(fields(Kinds))
    table = np.array([column + (padding,) * (most - len(column)) for column in columns], dtype=np.float64)
    return Kinds(*np.moveaxis(table, 2, 0))


@lru_cache(maxsize=2**16)
def _columns(model: Model, layout: LayerLayout, each_rank: bool) -> tuple[tuple[float, ...], ...]:
    """Return each kind of rank of a layout, as the fields of `Kinds`."""
    runs: list[tuple[RankKind, list[int]]] = []
    of_ranks = rank_stages(model, layout)
    for rank, kind in enumerate(map(_together, of_ranks)):
        if each_rank or not runs or runs[-1][0] != kind:
            runs.append((kind, []))
        runs[-1][1].append(rank)
    alike = _alike(layout, of_ranks)
    return tuple((*vars(kind).values(), len(ranks), ranks[0], alike) for kind, ranks in runs)


def recomputed_layers(layers: Sequence[int], recompute: RecomputeRule) -> list[int]:
    """Return the number of fully recomputed layers of each stage."""
    if recompute == "full":
        return list(layers)
    if isinstance(recompute, tuple):
        return [min(count, asked) for count, asked in zip(layers, recompute, strict=True)]
    if isinstance(recompute, int):
        return [min(count, recompute) for count in layers]
    return [0] * len(layers)
