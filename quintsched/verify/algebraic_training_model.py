"""Algebraic model of training: five random numbers modulo a prime per piece, with the sequential gradients.

The model is its pieces 0, 1, 2, … in this order, and a stage has the weights of the piece that it holds. A piece
computes on each slice of a microbatch

    y = w·x + b + v·k        k' = q·k + u·x        k: the state passed from the previous slice, 0 for the first

with gradients derived by hand. A named weight that several stages hold is one more number, added to w on each of these
stages. A skip is m·y of the piece that makes it, and a piece that takes it adds t times that to its own output; m and t
are constants of the model that are not trained. Pieces with a loss have targets of their own.
`quintsched.verify.equivalence` runs plans on this model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from quintsched.ir.layout import Tie
from quintsched.ir.plan_data import PlanData

PRIME = 2**61 - 1

ModularNumber: TypeAlias = npt.NDArray[np.object_]
"""Array of integers modulo `PRIME`, one entry per replica: two along each replica axis."""

Gradient: TypeAlias = tuple[ModularNumber, ...]
"""Gradients of w, b, v, q and u, and then of each named weight that the stage shares with others."""


class Weights(NamedTuple):
    """Weights of one piece of the model."""

    w: int
    b: int
    v: int
    q: int
    u: int


class Saved(NamedTuple):
    """Tensors that a forward saves: its input, and the state from the previous slice."""

    x: ModularNumber
    k: ModularNumber


def forward(weights: Weights, saved: Saved) -> tuple[ModularNumber, ModularNumber]:
    """Return the output, and the state for the next slice."""
    w, b, v, q, u = weights
    return (w * saved.x + b + v * saved.k) % PRIME, (q * saved.k + u * saved.x) % PRIME


def backward(
    weights: Weights, saved: Saved, grad_y: ModularNumber, grad_k: ModularNumber
) -> tuple[ModularNumber, ModularNumber, Gradient]:
    """Return the gradients of the input, of the state from the previous slice, and of the weights."""
    w, _, v, q, u = weights
    x, k = saved
    of_weights = tuple(part % PRIME for part in (grad_y * x, grad_y, grad_y * k, grad_k * k, grad_k * x))
    return (w * grad_y + u * grad_k) % PRIME, (v * grad_y + q * grad_k) % PRIME, of_weights


def added(*gradients: Gradient) -> Gradient:
    """Return the sum of gradients, entry by entry."""
    return tuple(sum(column[1:], column[0]) % PRIME for column in zip(*gradients, strict=True))


class AlgebraicModel:
    """Pieces of the model and the data: the input and the target of every unit, on every replica."""

    def __init__(self, plan: PlanData, seed: int = 0) -> None:
        layout = plan.layout
        self._random = random.Random(seed)
        parts = sorted({layout.part_of(stage) for stage in range(len(plan.stage_to_pp))})
        drawn = {part: Weights(*(self._draw() for _ in Weights._fields)) for part in parts}
        self._axes = layout.mesh.replica_axes
        self.zero = self._numbers(lambda: 0)
        self.weights = {stage: drawn[layout.part_of(stage)] for stage in range(len(plan.stage_to_pp))}
        self.named = {stage: [tie for tie in layout.ties_of(stage) if tie.number] for stage in self.weights}
        for _, stages in layout.tied:
            more = self._draw()
            self.weights |= {s: self.weights[s]._replace(w=(self.weights[s].w + more) % PRIME) for s in stages}
        self.makes = {(skip, layout.part_of(stages[0])): self._draw() for skip, (_, stages) in enumerate(layout.skips)}
        """Factor of a piece's output in each skip that it makes, by (skip, piece)."""
        self.takes = {
            (skip, layout.part_of(stage)): self._draw()
            for skip, (_, stages) in enumerate(layout.skips)
            for stage in stages[1:]
        }
        """Factor of each skip that a piece takes, by (skip, piece)."""
        self.inputs = [self._numbers(self._draw) for _ in range(layout.num_microbatches)]
        self.last = max(parts)
        targets = [self._numbers(self._draw) for _ in range(layout.num_microbatches)]
        self.targets = {(self.last, unit): target for unit, target in enumerate(targets)}
        """Targets by (piece, unit), for pieces with a loss."""
        for piece in sorted({layout.part_of(stage) for stage in layout.losses} - {self.last}):
            self.targets |= {(piece, unit): self._numbers(self._draw) for unit in range(layout.num_microbatches)}

    def _draw(self) -> int:
        return self._random.randrange(1, PRIME)

    def _numbers(self, draw: Callable[[], int]) -> ModularNumber:
        """Draw one number per replica; two replicas per axis suffice to tell sums over different axes apart."""
        drawn = [draw() for _ in range(2 ** len(self._axes))]
        return np.array(drawn, dtype=object).reshape((2,) * len(self._axes) or 1)

    def share(self, stage: int, of_weights: Gradient) -> Gradient:
        """Return the gradient of all weights that a stage holds, given that of its own five."""
        return (*of_weights, *(of_weights[0] for _ in self.named[stage]))

    def held(self, tie: Tie, stage: int) -> slice:
        """Return the entries of a stage's gradient that a tie covers: all, or the named weight's."""
        if not tie.number:
            return slice(None)
        at = len(Weights._fields) + self.named[stage].index(tie)
        return slice(at, at + 1)

    def loss(self, piece: int, unit: int, y: ModularNumber) -> ModularNumber:
        """Return the loss (y - target)^2 of a unit after a piece; 0 if the piece has no loss."""
        off: ModularNumber = y - self.targets.get((piece, unit), y)
        return self.modulo(off * off)

    def loss_grad(self, piece: int, unit: int, y: ModularNumber) -> ModularNumber:
        """Return the gradient of the loss with respect to y."""
        return self.modulo(2 * (y - self.targets.get((piece, unit), y)))

    def over(self, axes: Sequence[str], number: ModularNumber) -> ModularNumber:
        """Return the sum over these replica axes, on each replica (an all-reduce)."""
        along = tuple(self._axes.index(axis) for axis in axes)
        return self.modulo(self.zero + number.sum(axis=along, keepdims=True))

    def share_of(self, axes: Sequence[str], gradient: Gradient) -> Gradient:
        """Return each replica's shard along these axes: entries are dealt out in turn; 0 for all others."""
        which = np.indices(self.zero.shape)
        owner = sum((which[self._axes.index(axis)] * 2**k for k, axis in enumerate(axes)), np.zeros_like(which[0]))
        return tuple(np.where(owner == k % 2 ** len(axes), part, self.zero) for k, part in enumerate(gradient))

    def over_replicas(self, number: ModularNumber) -> ModularNumber:
        """Return the sum over all replicas, on each replica."""
        return self.over(self._axes, number)

    @staticmethod
    def modulo(number: ModularNumber) -> ModularNumber:
        """Return the numbers reduced modulo `PRIME`."""
        return np.remainder(number, PRIME)


@dataclass(frozen=True)
class Sequential:
    """Sequential reference in one process: each microbatch forward through all pieces in order, then backward.

    It knows no routes: a stage's gradient is that of its piece, over all microbatches.
    """

    plan: PlanData
    model: AlgebraicModel

    @cached_property
    def _holders(self) -> dict[int, int]:
        """Pieces of the model in order, with a stage that holds each."""
        stages = range(len(self.plan.stage_to_pp) - 1, -1, -1)
        return dict(sorted({self.plan.layout.part_of(stage): stage for stage in stages}.items()))

    @cached_property
    def _shares(self) -> dict[tuple[int, int], Gradient]:
        """Contribution of each (piece, unit) to the gradient of that piece."""
        return {place: share for place, share, _ in self._all()}

    def share(self, stage: int, unit: int) -> Gradient:
        """Return a unit's contribution to the gradient of the piece that a stage holds."""
        return self._shares[self.plan.layout.part_of(stage), unit]

    @cached_property
    def total_loss(self) -> ModularNumber:
        """Sum of all losses, over all replicas."""
        losses = (loss for _, _, loss in self._all())
        return self.model.over_replicas(sum(losses, self.model.zero) % PRIME)

    def gradient(self, stage: int, bucket: int = 0) -> Gradient:
        """Gradient of a stage's weights, summed over units, all stages that hold them, and the bucket's replicas."""
        found = list(self._of_stage(stage))
        for tie in self.model.named[stage]:
            parts = [self._of_stage(holder)[self.model.held(tie, holder)] for holder in tie.stages]
            found[self.model.held(tie, stage)] = added(*parts)
        return tuple(self.model.over(self.plan.layout.buckets[bucket], part) for part in found)

    def step_gradient(self, stage: int, bucket: int) -> Gradient:
        """Gradient that a stage's optimizer step must use: the full one, or each rank's shard under ZeRO-3."""
        gradient, layout = self.gradient(stage, bucket), self.plan.layout
        shared = layout.zero.shards_weights
        return self.model.share_of(layout.buckets[bucket], gradient) if shared else gradient

    def _of_stage(self, stage: int) -> Gradient:
        """Return the gradient of the piece that a stage holds, summed over all units."""
        return added(*(self.share(stage, unit) for unit in range(self.plan.layout.num_microbatches)))

    def _all(self) -> Iterator[tuple[tuple[int, int], Gradient, ModularNumber]]:
        slices = self.plan.schedule.slices
        for first in range(0, self.plan.layout.num_microbatches, slices):
            yield from self._microbatch(range(first, first + slices))

    def _microbatch(self, units: range) -> Iterator[tuple[tuple[int, int], Gradient, ModularNumber]]:
        model, saved = self.model, {}
        losses, loss_grads = dict[tuple[int, int], ModularNumber](), dict[tuple[int, int], ModularNumber]()
        values = {unit: model.inputs[unit] for unit in units}
        skips: dict[tuple[int, int], ModularNumber] = {}
        for piece, holder in self._holders.items():
            keys = model.zero
            for unit in units:
                saved[piece, unit] = Saved(values[unit], keys)
                values[unit], keys = forward(model.weights[holder], saved[piece, unit])
                for skip, times in _of_piece(model.takes, piece):
                    values[unit] = model.modulo(values[unit] + times * skips[skip, unit])
                for skip, times in _of_piece(model.makes, piece):
                    skips[skip, unit] = model.modulo(times * values[unit])
                losses[piece, unit] = model.loss(piece, unit, values[unit])
                loss_grads[piece, unit] = model.loss_grad(piece, unit, values[unit])
        grads = dict.fromkeys(units, model.zero)
        of_skips = dict.fromkeys(skips, model.zero)
        for piece, holder in reversed(self._holders.items()):
            grad_k = model.zero
            for unit in reversed(units):
                grads[unit] = model.modulo(grads[unit] + loss_grads[piece, unit])
                for skip, times in _of_piece(model.makes, piece):
                    grads[unit] = model.modulo(grads[unit] + times * of_skips[skip, unit])
                for skip, times in _of_piece(model.takes, piece):
                    of_skips[skip, unit] = model.modulo(of_skips[skip, unit] + times * grads[unit])
                grads[unit], grad_k, share = backward(model.weights[holder], saved[piece, unit], grads[unit], grad_k)
                yield (piece, unit), model.share(holder, share), losses[piece, unit]


def _of_piece(numbers: dict[tuple[int, int], int], piece: int) -> list[tuple[int, int]]:
    """Return the (skip, factor) pairs of a piece."""
    return [(skip, number) for (skip, of), number in numbers.items() if of == piece]
