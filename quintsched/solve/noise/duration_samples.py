"""Samples of durations, and the times of one order under all of them at once.

0.1       each duration times exp(0.1 z), z normal
3%x4      3 % of computations take four times as long
traces/   each duration times a factor that a run has measured: a computation over the usual one of its stage
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quintsched.errors import UsageError, quoted
from quintsched.ir.instruction_columns import Amounts
from quintsched.ir.instruction_set import Bwd, BwdInput, BwdWeight, Fwd
from quintsched.solve.order_problem import Objective
from quintsched.solve.order_timing import time_orders
from quintsched.solve.search_problem import Orders, Problem
from quintsched.trace.measured_trace import Trace

MOST_SIGMA, MOST_FACTOR = 3.0, 1000.0


@dataclass(frozen=True)
class Jitter:
    """Distribution of factors of durations: a normal logarithm, a share of slow ones, or a sample that was measured."""

    text: str
    sigma: float = 0.0
    share: float = 0.0
    factor: float = 1.0
    measured: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Jitter:
        """Return the jitter that a text describes; raises `UsageError` for another text, or a trace that is broken."""
        slow = re.fullmatch(r"(\d+(?:\.\d+)?) ?% ?x ?(\d+(?:\.\d+)?)", text.strip())
        if slow is not None:
            share, factor = float(slow[1]) / 100, float(slow[2])
            if not (share <= 1 and 1 <= factor <= MOST_FACTOR):
                raise UsageError(f"jitter {quoted(text)}: give at most 100 %, and a factor of 1 to {MOST_FACTOR:g}")
            return cls(text, share=share, factor=factor)
        try:
            sigma = float(text)
        except ValueError:
            if not text.strip():
                raise UsageError(
                    "jitter is empty; give a number, like 0.1, or 3%x4, or a directory of traces"
                ) from None
            return cls(text, measured=_measured(Path(text)))
        if not 0 <= sigma <= MOST_SIGMA:
            raise UsageError(f"jitter is {quoted(text)}; give a number from 0 to {MOST_SIGMA:g}")
        return cls(text, sigma=sigma)

    def factors(self, rng: np.random.Generator, rows: int, samples: int) -> Amounts:
        """Return factors of durations: (rows, samples)."""
        if self.measured:
            return rng.choice(np.array(self.measured), (rows, samples))
        found: Amounts = np.exp(self.sigma * rng.standard_normal((rows, samples)))
        return found * np.where(rng.random((rows, samples)) < self.share, self.factor, 1.0)


def _measured(directory: Path) -> tuple[float, ...]:
    """Return the factors of all computations of a run."""
    if not directory.is_dir():
        raise UsageError(f"jitter {quoted(str(directory))}: give a number, like 0.1, a share, like 3%x4, or traces")
    trace = Trace.load_run(directory)
    found: list[float] = []
    for number in trace.steps:
        times: dict[tuple[type, int], list[float]] = {}
        for row in trace.step(number).timeline:
            for span in row:
                one = span.instruction
                if isinstance(one, Fwd | Bwd | BwdInput | BwdWeight):
                    times.setdefault((type(one), one.stage), []).append(span.end - span.runs)
        for own in times.values():
            usual = float(np.median(own))
            found += [taken / usual for taken in own if usual > 0]
    if not found:
        raise UsageError(f"jitter {quoted(str(directory))}: no computation was measured")
    return tuple(found)


@dataclass(frozen=True, eq=False)
class Samples:
    """Durations and leads of each computation of a problem in each sample: (computations, samples)."""

    problem: Problem
    durations: Amounts
    leads: Amounts

    @classmethod
    def draw(cls, problem: Problem, jitter: Jitter, number: int, seed: Sequence[int]) -> Samples:
        """Return samples; other seeds give other ones."""
        factors = jitter.factors(np.random.default_rng([one % 2**64 for one in seed]), len(problem.durations), number)
        return cls(problem, *(np.array(table)[:, None] * factors for table in (problem.durations, problem.leads)))

    def values(self, orders: list[list[int]] | Orders, objective: Objective) -> Amounts | None:
        """Return the time of an order in each sample; None if it cannot run. As `order_timing` counts."""
        problem, timing = self.problem, time_orders(self.problem, orders)
        if timing is None:
            return None
        zero = np.zeros(self.durations.shape[1])
        ends, free = [zero] * len(self.durations), [zero] * problem.pp
        last, starts = dict[int, Amounts](), dict[int, Amounts]()
        for number in timing.sequence:
            rank, needed, wire = problem.ranks[number], problem.needs[number], problem.wires[number]
            now = free[rank]
            if needed >= 0:
                arrival = ends[needed]
                if wire >= 0:
                    arrival = last[wire] = np.maximum(arrival, last.get(wire, zero)) + problem.lags[number]
                now = np.maximum(now, arrival - self.leads[number])
            starts.setdefault(rank, now)
            free[rank] = ends[number] = now + self.durations[number]
        spans = free if objective == "makespan" else [free[rank] - start for rank, start in starts.items()]
        found: Amounts = np.max(spans, axis=0)
        return found


def percentile(values: Amounts, share: float = 0.95) -> float:
    """Return the least value that this share of the samples does not exceed."""
    return float(np.sort(values)[math.ceil(share * len(values)) - 1])
