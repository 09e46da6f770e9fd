"""Estimate, from overlapped pairs of a trace, of the communication inside stages that one side hides behind the other.

    alone           Fwd  f + x     Bwd  b + y       x, y: exchanges, during which nothing is computed
    side by side    f + b                           if each exchange is shorter than the computation that hides it
    so              x + y  =  Fwd + Bwd - both      half each: a backward exchanges as much as its forward

Exchanges that are never hidden cannot be separated: they stay part of the computations. If a pair takes longer than
its sides alone, the excess is added to the computations, so that the total time is preserved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quintsched.graph.event_graph import Times
from quintsched.ir.instruction_columns import Columns, Flags, Ints
from quintsched.ir.instruction_set import Overlap

FORWARD_SHARE = 1 / 3
"""Forward's share of a pair's computation, if nothing else is known."""

FIT_ROUNDS = 50
"""Number of rounds of the alternating fit of factors and usual times."""

TINY = float(np.finfo(float).tiny)


class Alone(NamedTuple):
    """Times of the computations of each stage that run alone (0 if none does), with their numbers."""

    forward: Times
    num_forward: Ints
    backward_input: Times
    backward_weight: Times
    num_backward: Ints


class TimeFactors(NamedTuple):
    """Factors on the usual time: of forwards per unit, of backwards per unit, and of each pair."""

    of_forward: Times
    of_backward: Times
    of_pairs: Times


@dataclass(frozen=True, eq=False)
class Pairs:
    """Overlapped forwards and backwards, one entry per row that holds such a pair."""

    rows: Ints
    forward_stage: Ints
    forward_unit: Ints
    backward_stage: Ints
    backward_unit: Ints

    @classmethod
    def from_columns(cls, columns: Columns) -> Pairs:
        """Find the overlapped pairs of a plan."""
        rows = columns.rows_where(Overlap)
        return cls(rows, *columns.pairs("forward", rows), *columns.pairs("backward", rows))

    def __len__(self) -> int:
        return len(self.rows)

    def costs(self, run: Times, alone: Alone) -> dict[str, list[float]]:
        """Return computations and exchanges per stage; `run` is the time of each row, (replicas, steps, rows)."""
        took = run[..., self.rows]
        forward, inputs, weights = self._filled(took, alone)
        backward, stages = inputs + weights, len(forward)
        of_forwards, forwards = _typical(took, self.forward_stage, stages)
        of_backwards, backwards = _typical(took, self.backward_stage, stages)
        beside_forward = _means(backward[self.backward_stage], self.forward_stage, stages)
        beside_backward = _means(forward[self.forward_stage], self.backward_stage, stages)
        hidden_behind = np.where(backwards > 0, backward + beside_backward - of_backwards, 0.0)
        in_backward = np.clip(hidden_behind / 2, 0.0, inputs)
        left = beside_forward - _means(in_backward[self.backward_stage], self.forward_stage, stages)
        in_forward = np.where(forwards > 0, np.clip(forward + left - of_forwards, 0.0, forward), 0.0)
        hidden = np.where(forwards > 0, forward + beside_forward - of_forwards, 0.0)
        more_forward = _taken_over(-hidden / 2, forwards, alone.num_forward)
        more_backward = _taken_over(-hidden_behind / 2, backwards, alone.num_backward)
        longer = 1 + np.divide(more_backward, backward, out=np.zeros(stages), where=backward > 0)
        found = {
            "forward": forward - in_forward + more_forward,
            "backward_input": (inputs - in_backward) * longer,
            "backward_weight": weights * longer,
            "exchange": in_forward,
            "exchange_backward": in_backward,
        }
        return {name: values.tolist() for name, values in found.items()}

    def _filled(self, took: Times, alone: Alone) -> tuple[Times, Times, Times]:
        """Return the times of a forward and of both halves of a backward alone, estimated from pairs if need be."""
        stages, both = len(alone.forward), np.median(took, axis=(0, 1))
        forward, backward = alone.forward, alone.backward_input + alone.backward_weight
        known_forward, known_backward = alone.num_forward > 0, alone.num_backward > 0
        beside = np.where(known_backward[self.backward_stage], both - backward[self.backward_stage], 0.0)
        guess = _means(np.maximum(beside, both * FORWARD_SHARE), self.forward_stage, stages)
        forward = np.where(known_forward, forward, guess)
        guess = _means(both - np.minimum(forward[self.forward_stage], both / 2), self.backward_stage, stages) / 2
        inputs = np.where(known_backward, alone.backward_input, guess)
        return forward, inputs, np.where(known_backward, alone.backward_weight, guess)

    def factors(self, run: Times, alone: Alone, forwards: Times, backwards: Times) -> TimeFactors:
        """Return the factors of units, and of rows that hold a pair, on the usual time.

        `forwards` and `backwards`, (stages, units), are the times of those that run alone, else 0. Usual times and
        factors are fitted in turn; the time of a pair is split between its sides by the current estimate.
        """
        took, stages = np.median(run[..., self.rows], axis=(0, 1)), len(forwards)
        forward, inputs, weights = self._filled(run[..., self.rows], alone)
        backward = inputs + weights
        pairs, pair = np.unique(self.forward_stage * stages + self.backward_stage, return_inverse=True)
        of_forward, of_backward = np.ones((2, forwards.shape[1]))
        for _ in range(FIT_ROUNDS):
            forward, backward = _usual(forwards, of_forward, forward), _usual(backwards, of_backward, backward)
            one = forward[self.forward_stage] * of_forward[self.forward_unit]
            other = backward[self.backward_stage] * of_backward[self.backward_unit]
            both = forward[self.forward_stage] + backward[self.backward_stage]
            of_pairs = (one + other) / np.maximum(both, TINY)
            usual = _means(took / np.maximum(of_pairs, TINY), pair, len(pairs))[pair]
            more = took / np.maximum(usual * of_pairs, TINY)
            of_forward = _unit_means(forwards, forward, (self.forward_stage, self.forward_unit), one * more)
            of_backward = _unit_means(backwards, backward, (self.backward_stage, self.backward_unit), other * more)
        return TimeFactors(of_forward, of_backward, of_pairs)


def _usual(took: Times, factors: Times, otherwise: Times) -> Times:
    """Return each stage's mean of `took` / factors, (stages, units), over those that ran alone; else `otherwise`."""
    there = took > 0
    means = np.where(there, took / np.maximum(factors, TINY), 0.0).sum(axis=1) / np.maximum(there.sum(axis=1), 1)
    return np.where(there.any(axis=1), means, otherwise)


def _unit_means(alone: Times, usual: Times, places: tuple[Ints, Ints], of_pairs: Times) -> Times:
    """Return the factor of each unit, alone and in pairs, averaged over stages and normalized to mean 1."""
    took = alone.copy()
    took[places] = of_pairs
    there = (took > 0) & (usual[:, None] > 0)
    share = np.divide(took, usual[:, None], out=np.zeros_like(took), where=there)
    means = np.where(there.any(axis=0), share.sum(axis=0) / np.maximum(there.sum(axis=0), 1), 1.0)
    return means / max(float(means.mean()), TINY)


def unit_factors(took: Times, visits: Flags) -> Times:
    """Return each unit's time relative to its stage's mean, averaged over its stages; `took` is (stages, units)."""
    usual = took.sum(axis=1, keepdims=True) / np.maximum(visits.sum(axis=1, keepdims=True), 1)
    counted = visits & (usual > 0)
    share = np.divide(took, usual, out=np.zeros_like(took), where=counted)
    mean = share.sum(axis=0) / np.maximum(counted.sum(axis=0), 1)
    found: Times = np.where(counted.any(axis=0), mean, 1.0)
    return found


def _typical(took: Times, group: Ints, groups: int) -> tuple[Times, Ints]:
    """Return the typical time of each group's entries (0 if it has none), and their number."""
    counts = np.bincount(group, minlength=groups)
    means = np.zeros((*took.shape[:-1], groups))
    for number in np.flatnonzero(counts):
        means[..., number] = took[..., group == number].mean(axis=-1)
    found: Times = np.median(means, axis=(0, 1))
    return found, counts


def _means(values: Times, group: Ints, groups: int) -> Times:
    """Return the mean of each group, 0 if it has no entry."""
    counts = np.bincount(group, minlength=groups)
    found: Times = np.bincount(group, values, minlength=groups) / np.maximum(counts, 1)
    return found


def _taken_over(more: Times, pairs: Ints, alone: Ints) -> Times:
    """Return the increase of all times of a stage that yields its pairs' excess over their sides in total."""
    found: Times = np.maximum(more, 0.0) * pairs / np.maximum(pairs + alone, 1)
    return found
