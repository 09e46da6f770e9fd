"""Training runs on several ranks besides the matrix of schedules: each axis, ZeRO, rings and trees, dtypes, compiling.

Run("zero 3", Case("zb-h1", "dp=2", 2, zero=3))         ─▶ on every rank: engine, losses, weights
Run("ring", Case(…, communication="ring"))              ─▶ the same in one process, to be equal within `tolerance`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import quintsched as qs
from quintsched.runtime.comm import Transport
from tests.runtime import mesh_matrix
from tests.runtime.matrix import CASES, LENGTH, OVERLAPPING, Case
from tests.runtime.toys import Outcome, Task, ids_task, train_rank

FLOAT64, FLOAT32 = 1e-10, 1e-4
"""Tolerances in double and in single precision: max|a-b| / max(1, max|b|) per tensor."""

MORE = [
    Case("interleaved-1f1b", "pp=8", 8, chunks=2),
    Case("v-half", "dp=2,pp=4", 4),
    Case("dualpipe-v", "dp=2,pp=4", 8),
    Case("chimera", "dp=2,pp=4", 8),
    Case("hanayo", "dp=2,pp=2", 4, chunks=2),
    Case("hanayo", "dp=2,pp=4", 4, chunks=2),
]
"""Schedules that the matrix does not take to 4 or 8 ranks."""


@dataclass(frozen=True)
class Run:
    """One training on several ranks: a case of the matrix, and what the engine is told besides.

    `moves` change the order of the plan's instructions (rank, from, to).
    """

    name: str
    case: Case
    dtype: torch.dtype = torch.float64
    compiled: bool = False
    traced: bool = False
    moves: tuple[tuple[int, int, int], ...] = ()

    @property
    def world_size(self) -> int:
        return self.case.world_size

    @property
    def tolerance(self) -> float:
        return FLOAT64 if self.dtype == torch.float64 else FLOAT32

    @property
    def plan(self) -> qs.Plan:
        return moved(self.case.plan, *self.moves)

    def task(self, steps: int) -> Task:
        samples = 2 * self.case.in_step
        dtype = self.dtype if self.dtype.itemsize > 2 else torch.float32
        return Task.make(steps, samples, dtype) if self.case.model == "vit" else ids_task(steps, samples, LENGTH)

    def train(self, transport: Transport, steps: int, **more: Any) -> Outcome:
        """Train on one rank."""
        return train_rank(
            transport,
            self.plan,
            self.task(steps),
            self.case.blocks,
            dtype=self.dtype,
            tied=self.case.tied,
            compiled=self.compiled,
            **more,
        )

    def alone(self) -> Outcome:
        """Return the result of one process over the matrix's steps, on the CPU."""
        return self.case.alone(self.dtype)


def moved(plan: qs.Plan, *moves: tuple[int, int, int]) -> qs.Plan:
    """Return the plan after moves of one instruction each: on a rank, from an index to another."""
    if not moves:
        return plan
    programs = [list(program) for program in plan.programs]
    for rank, source, target in moves:
        programs[rank].insert(target, programs[rank].pop(source))
    return replace(plan, programs=tuple(map(tuple, programs)))


SHORT = Case("1f1b", "pp=2", 4)
EARLY_RECEIVE = ((0, 3, 4),)
"""Rank 0 waits for its first gradient before it sends its second activation: the README's."""
CROSSED_SENDS = ((1, 2, 4),)
"""Rank 1 sends its first gradient before it receives the second activation, which rank 0 sends at that time."""
LATE_SEND = ((0, 4, 1), (0, 5, 2), (0, 3, 5), (1, 2, 0))
"""Rank 0 sends its first activation after its second, and before that waits for a gradient of the first."""

FEATURES = [
    Run("zero 1", Case("1f1b", "dp=2", 2, zero=1, buckets=2)),
    Run("zero 2", Case("zb-h1", "dp=2", 2, zero=2)),
    Run("zero 3", Case("1f1b", "dp=2", 2, zero=3)),
    Run("tp", Case("1f1b", "tp=2", 2)),
    Run("cp", Case("zb-h1", "cp=2", 2, model="gpt")),
    Run("ring over dp", Case("1f1b", "dp=2", 2, communication="ring")),
    Run("tree over dp", Case("zb-h1", "dp=2", 2, communication="tree")),
    Run("ring and zero 2", Case("1f1b", "dp=2", 2, zero=2, communication="ring")),
    Run("float32", Case("zbv", "pp=2", 4), torch.float32),
    Run("float32, tp", Case("1f1b", "tp=2", 2), torch.float32),
    Run("compiled", Case("1f1b", "pp=2", 4, model="gpt"), torch.float32, compiled=True),
    Run("compiled, tp", Case("zb-h1", "tp=2", 2, model="gpt"), torch.float32, compiled=True),
    Run("offload", Case("1f1b", "pp=2", 4, recompute=(0, 1), offload=1)),
    Run("zero 3 in a pipeline", Case("interleaved-1f1b", "dp=2,pp=2", 2, chunks=2, zero=3, model="tied")),
    Run("tp in a pipeline", Case("zb-h1", "pp=2,tp=2", 3)),
    Run("cp in a pipeline", Case("zb-h1", "pp=2,cp=2", 3, model="tied")),
    Run("ring of four", Case("1f1b", "dp=4", 2, communication="ring")),
    Run("tree of four", Case("1f1b", "dp=4", 2, communication="tree")),
    Run("float32 on four", Case("dualpipe", "dp=2,pp=2", 4, buckets=2), torch.float32),
]
EXPERTS = [
    mesh_matrix.Case("1f1b", "ep=2", "gpt", False),
    mesh_matrix.Case("zb-h1", "ep=2,pp=2", "llama", False),
    mesh_matrix.Case("1f1b", "ep=2,tp=2", "switch", True),
]
"""Mixtures of experts, with dropout and clipped gradients."""

FREE = [Run("early receive", SHORT, moves=EARLY_RECEIVE), Run("crossed sends", SHORT, moves=CROSSED_SENDS)]
"""Plans that are free as the runtime wires ranks over NCCL, and on fewer queues would hang."""


def of_schedules(world_size: int) -> list[Run]:
    """Return a run of every schedule, and of what is imported or a user's own."""
    cases = [case for case in (*CASES, *MORE) if case.world_size == world_size]
    return [Run(str(case), case) for case in {case.schedule: case for case in reversed(cases)}.values()]


def _all() -> Mapping[str, Run]:
    plain = [replace(case, overlap=False) for case in OVERLAPPING.values()]
    cases = [*CASES, *MORE, *OVERLAPPING.values(), *plain]
    return {run.name: run for run in (*(Run(str(case), case) for case in cases), *FEATURES, *FREE)}


RUNS = _all()
"""All runs by their names, which is how a rank is told of them."""


def names(runs: Sequence[Run]) -> list[str]:
    return [run.name for run in runs]
