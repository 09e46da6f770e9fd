"""Reductions of losses, and the weight of a microbatch by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintsched.errors import MisfitError, counted

from ..blocks.trees import flatten


class Over(StrEnum):
    """Reduction of a loss: a sum, or the unit of its mean."""

    SUM = "sum"
    SAMPLES = "samples"
    TOKENS = "tokens"
    TARGETS = "targets"
    NUMBERS = "numbers"
    CLASSES = "classes"
    MICROBATCH = "microbatch"
    STATED = "stated"


@dataclass(frozen=True)
class LossWeight:
    """Weight of a microbatch in the loss of the batch.

    Attributes:
        over: the reduction of the loss.
        leaf: path of the targets that define it (see `Tree.paths`); `shift`: number of first tokens left out.
        ignored: the target that counts for nothing (`ignore_index`).
        table: index of the class weights among those that the loss holds.
        by_slices: whether a slice of the sequences weighs as many as its tokens; else all slices weigh the same.
        is_guarded: whether the gradient of a microbatch of weight 0 is not finite.
        is_clamped: whether the loss of weight 0 is finite, as it is divided by 1 then.
    """

    over: Over
    leaf: str = ""
    shift: int = 0
    ignored: int = -100
    table: int = 0
    by_slices: bool = True
    is_guarded: bool = False
    is_clamped: bool = False

    def __str__(self) -> str:
        if self.over in (Over.SUM, Over.STATED):
            return "a sum" if self.over is Over.SUM else "a sum with its weight"
        if self.over in (Over.TARGETS, Over.CLASSES):
            where = f"targets{self.leaf} that are not {self.ignored}"
            return f"a mean over {where}" + (", by the weights of classes" if self.over is Over.CLASSES else "")
        return f"a mean over {f'targets{self.leaf}, as weights' if self.over is Over.NUMBERS else self.over}"

    def of_targets(self, targets: Mapping[str, Tensor], tables: Sequence[Tensor]) -> Tensor:
        """Return the weight of targets, 0-dimensional; raise `MisfitError` for class probabilities in place of ids."""
        leaf = targets[self.leaf]
        leaf = leaf[:, self.shift :] if self.shift else leaf
        if self.over is Over.NUMBERS:
            return leaf.detach().sum(dtype=torch.promote_types(leaf.dtype, torch.float32))
        kept = leaf != self.ignored
        if self.over is Over.TARGETS:
            return kept.sum()
        if leaf.is_floating_point():
            raise MisfitError(
                f"targets{self.leaf} were ids, which class weights weigh, and now they are shares of classes, which "
                "weigh as samples; give either in all steps, or return (sum, weight)"
            )
        table = tables[self.table].detach()
        return torch.where(kept, table.to(leaf.device)[torch.where(kept, leaf, 0)], 0.0).sum()


class WeightFinding(NamedTuple):
    """Result of an examination: a weight, or the reason why there is none."""

    weight: LossWeight | None
    why: str = ""


WITHOUT_GRADIENT = WeightFinding(LossWeight(Over.SAMPLES))
"""Finding for a loss without gradient, whose weight is undecided."""


def named(targets: Any) -> dict[str, Tensor]:
    """Return the tensors of targets by path."""
    tree, tensors = flatten(targets)
    return dict(zip(tree.paths, tensors, strict=True))


class EvenWeights:
    """Weight per sample of a mean used beside losses of blocks: it has to be the same in all microbatches of a step.

        6 targets for 2 samples, 6 for 2, 6 for 2          the mean over targets is that of the whole batch
        6 targets for 2 samples, 3 for 2                   refused: one weight is wrong for one of both

    Args:
        rule: the reduction of the mean.

    Attributes:
        of_each: the weight of one sample in the step's first microbatch; None: there was none.
        agreed: the same of the last step in which ranks agreed on it.
    """

    def __init__(self, rule: LossWeight) -> None:
        self.rule = rule
        self.of_each: float | None = None
        self.agreed: float | None = None

    def doubt(self, weight: Tensor | float, samples: int) -> str:
        """Return the reason why a microbatch's samples weigh otherwise than those before; "": they weigh the same."""
        weight = float(weight)
        self.of_each = weight / samples if self.of_each is None else self.of_each
        if abs(weight - samples * self.of_each) <= 1e-6 * weight:
            return ""
        return (
            "blocks have losses of their own beside it, which weigh as samples do, but there is a mean over "
            f"{self.rule.over}, of which a microbatch has {weight:g} for {counted(samples, 'sample')}, and others have "
            f"{self.of_each:g} for each"
        )
