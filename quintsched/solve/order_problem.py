"""Problem of a certificate: computations of a step with times, messages and activations, on ranks with a memory cap.

Every backward is split: its weight half may directly follow its input half, and then takes as long as a whole one. A
computation is a number, `(kind * num_stages + stage) * microbatches + microbatch`, with the kinds forward, input half
and weight half. All times are in the unit of the costs, all activations in microbatches of a whole rank.

    rank 0   F0 ……… [R0 ▏ I0] W0      the input half of a stage that recomputes begins with the recomputed forward R0,
    rank 1      ………… I0 ╯              which needs no gradient: it leads the arrival by the time of R0

Two routes in opposite directions (`bidirectional`) are one problem with the stages of both, each for its half of the
microbatches: what is `m` below is the m-th microbatch of the route that its stage is on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

import numpy as np

from quintsched.errors import UsageError, counted
from quintsched.ir.instruction_columns import Amounts, Ints
from quintsched.ir.layout import recomputed_units
from quintsched.ir.plan_data import ScheduleSpec
from quintsched.simulation.costs import Costs

FORWARD, INPUT_HALF, WEIGHT_HALF = range(3)
EPSILON = 1e-9
"""Difference that counts as none between numbers of units, and between activations as a share of the cap."""

Chosen = tuple[tuple[int, ...], ...]
"""For each stage, the microbatches for which it recomputes."""

Objective = Literal["span", "makespan"]
"""Time that is minimised: the longest span of a rank, from its first forward to its last weight half, or the makespan,
from the first computation of any rank to the last."""


@dataclass(frozen=True)
class StepProblem:
    """Computations of one step, numbered; `durations` to `leads` have one entry per computation.

    Attributes:
        pp, microbatches, stage_to_pp: sizes (the microbatches of one route), and the pipeline rank of each stage.
        routes: number of routes, each with as many stages, one after the other, and as many microbatches.
        durations: time of each computation.
        lags: time of the message that a computation waits for. The messages from one rank to another go one after the
            other, in the order in which they are needed.
        holds: activations that begin to be held when a computation starts (a forward; an input half after which more
            is held than before), or that are freed when it ends (negative: the halves of a backward).
        rises: activations that a computation adds while it runs, to what is held when it starts.
        leads: time by which a computation may begin before what it needs has arrived: its own recomputation.
        caps: most activations of each rank; infinity: any number.
        grows: whether a half of a backward leaves more activations than it finds. Then whole backwards need less memory
            than these halves, and only bounds of any cap hold for them.
    """

    pp: int
    microbatches: int
    stage_to_pp: tuple[int, ...]
    routes: int
    durations: tuple[float, ...]
    lags: tuple[float, ...]
    holds: tuple[float, ...]
    rises: tuple[float, ...]
    leads: tuple[float, ...]
    caps: tuple[float, ...]
    grows: bool

    @classmethod
    def of(
        cls,
        pp: int,
        microbatches: int,
        stage_to_pp: Sequence[int],
        costs: Costs | None = None,
        memory_cap: float | Sequence[float] | None = None,
        routes: int = 1,
        recompute: Sequence[int] = (),
        recompute_microbatches: Chosen = (),
    ) -> Self:
        """Return the problem of these sizes and costs.

        Args:
            pp: number of pipeline ranks.
            microbatches: number of microbatches, of all routes together: a multiple of `routes`.
            stage_to_pp: the pipeline rank of each stage; every rank has as many.
            costs: times, messages and activations; None: unit costs.
            memory_cap: most activations that a rank holds, in microbatches of a whole rank: one, or one per rank.
            routes: number of routes; each has an equal part of the stages and of the microbatches, in order.
            recompute: for each stage, whether it recomputes; (): none does.
            recompute_microbatches: for each stage, the microbatches for which it recomputes; (): for all, if it does.

        Raises:
            InputError: costs of other numbers of stages, microbatches or ranks.
            UsageError: caps of another number of ranks.
        """
        costs, stages = costs or Costs(), len(stage_to_pp)
        counts, each = ScheduleSpec("", microbatches, stages // pp // routes), microbatches // routes
        costs.check_fits(counts, stages, pp)
        every, units = np.indices((stages, each)).reshape(2, -1)
        units += every // (way := stages // routes) * each

        def added(*names: str) -> Amounts:
            parts = [costs.of_units(name, every, units, counts) for name in names]
            return np.asarray(np.add.reduce(parts) / counts.chunks)

        again = recomputed_units(tuple(recompute), recompute_microbatches, stages, microbatches, 1)[every, units]
        recomputed = np.where(again, added("recompute", "exchange"), 0.0)
        after, whole = added("activation_after_input"), added("activation")
        held, none = np.where(again, added("activation_checkpointed"), whole), np.zeros(len(every))
        times = added("forward", "exchange"), added("backward_input", "exchange_backward"), added("backward_weight")
        return cls(
            pp=pp,
            microbatches=each,
            stage_to_pp=tuple(stage_to_pp),
            routes=routes,
            durations=_joined(times[0], recomputed + times[1], times[2]),
            lags=tuple(_lags(costs, np.array(stage_to_pp), every, units, counts, way)),
            holds=_joined(held, after - held, -after),
            rises=_joined(held, np.maximum(np.maximum(whole, after) - held, 0.0), none),
            leads=_joined(none, np.where((every + 1) % way, recomputed, 0.0), none),
            caps=_caps(pp, memory_cap),
            grows=bool((after > whole).any()),
        )

    @property
    def num_stages(self) -> int:
        """Number of stages, of all routes together."""
        return len(self.stage_to_pp)

    @cached_property
    def reserved(self) -> tuple[float, ...]:
        """Most activations of each stage and microbatch, from its forward on."""
        each = self.num_stages * self.microbatches
        return tuple(map(float.__add__, self.holds[:each], self.rises[each : 2 * each]))

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        found = [0.0] * self.pp
        for number, duration in enumerate(self.durations):
            found[self.stage_to_pp[number // self.microbatches % self.num_stages]] += duration
        return tuple(found)

    @cached_property
    def delays(self) -> tuple[float, ...]:
        """Least time from the end of what each computation needs to its start: below 0 where it may begin before."""
        return tuple(map(float.__sub__, self.lags, self.leads))

    @cached_property
    def tables(self) -> tuple[Amounts, Amounts]:
        """Times and delays of computations, each (kinds, stages, microbatches)."""
        shape = (-1, self.num_stages, self.microbatches)
        return np.reshape(self.durations, shape), np.reshape(self.delays, shape)

    @cached_property
    def way_out(self) -> Amounts:
        """Least time from the start of each forward to the end of its last stage's, (stages, microbatches)."""
        times, lags = self.tables
        sent = np.concatenate((lags[FORWARD, 1:], np.zeros((1, self.microbatches))))
        return self._summed_along_routes(times[FORWARD] + sent)

    @cached_property
    def way_back(self) -> Amounts:
        """Least time from the end of the last stage's forward to the start of each input half, of the same shape."""
        times, lags = self.tables
        after = np.zeros_like(times[INPUT_HALF])
        after[:-1] = times[INPUT_HALF, 1:] + lags[INPUT_HALF, :-1]
        after[self.num_stages // self.routes - 1 :: self.num_stages // self.routes] = 0.0
        return self._summed_along_routes(after)

    def _summed_along_routes(self, times: Amounts) -> Amounts:
        """Return for each stage the sum of the times from it to the end of its route, (stages, microbatches)."""
        by_route = times.reshape(self.routes, -1, self.microbatches)
        return np.cumsum(by_route[:, ::-1], axis=1)[:, ::-1].reshape(times.shape)


def _joined(*kinds: Amounts) -> tuple[float, ...]:
    return tuple(np.concatenate(kinds).tolist())


def _lags(costs: Costs, ranks: Ints, every: Ints, units: Ints, counts: ScheduleSpec, way: int) -> list[float]:
    stages = len(ranks)

    def messages(named: Ints, source: Ints, target: Ints) -> list[float]:
        sends = (source >= 0) & (target >= 0) & (source < stages) & (target < stages)
        sends &= source // way == target // way
        ends = ranks[np.where(sends, source, 0)], ranks[np.where(sends, target, 0)]
        times = costs.message_times(np.where(sends, named, 0), units, *ends, counts)
        return list(np.where(sends & (ends[0] != ends[1]), times, 0.0))

    forwards = messages(every - 1, every - 1, every)
    return [*map(float, forwards), *map(float, messages(every, every + 1, every)), *([0.0] * len(forwards))]


def _caps(pp: int, memory_cap: float | Sequence[float] | None) -> tuple[float, ...]:
    caps = tuple(memory_cap) if isinstance(memory_cap, Sequence) else (memory_cap,) * pp
    if len(caps) != pp:
        values, ranks = counted(len(caps), "value"), counted(pp, "pipeline rank")
        raise UsageError(f"memory_cap has {values}; give one, or one for each of the {ranks}")
    return tuple(math.inf if cap is None else float(cap) for cap in caps)
