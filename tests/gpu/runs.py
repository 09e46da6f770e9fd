"""Training runs on several ranks: every schedule, each axis, ZeRO, rings and trees, experts, dtypes, compiling.

Run("zero 3", Case("zb-h1", "dp=2", 2, zero=3))         ─▶ on every rank: engine, losses, weights
Run("ring", Case(…, communication="ring"))              ─▶ the same in one process, to be equal within `tolerance`
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

import quintsched as qs
from quintsched.runtime.comm import Transport
from tests.runtime.grid import Case, Trained, train_rank
from tests.runtime.grid_cases import CASES
from tests.runtime.grid_models import BY_PAIRS, TRAINING

FLOAT64, FLOAT32 = 1e-10, 1e-4
"""Tolerances in double and in single precision: max|a-b| / max(1, max|b|) per tensor."""

MESHES = {2: ("pp=2",), 4: ("pp=4", "dp=2,pp=2"), 8: ("pp=8", "dp=2,pp=4")}
"""Meshes of every schedule, by the number of ranks; every other time the second."""


@dataclass(frozen=True)
class Run:
    """One training on several ranks: a case of the grid, and what the engine is told besides.

    `moves` change the order of the plan's instructions (rank, from, to).
    """

    name: str
    case: Case
    compiled: bool = False
    moves: tuple[tuple[int, int, int], ...] = ()

    @property
    def world_size(self) -> int:
        return self.case.world_size

    @property
    def tolerance(self) -> float:
        return FLOAT64 if self.case.dtype == torch.float64 else FLOAT32

    @property
    def plan(self) -> qs.Plan:
        return moved(self.case.plan, *self.moves)

    def train(self, transport: Transport, steps: int) -> Trained:
        """Train on one rank."""
        return train_rank(replace(self.case, steps=steps), transport, plan=self.plan, compiled=self.compiled)


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

SINGLE = torch.float32
FEATURES = [
    Run("zero 1", Case("1f1b", "dp=2", 2, zero=1, buckets=2)),
    Run("zero 2", Case("zb-h1", "dp=2", 2, zero=2)),
    Run("zero 3", Case("1f1b", "dp=2", 2, zero=3)),
    Run("tp", Case("1f1b", "tp=2", 2)),
    Run("cp", Case("zb-h1", "cp=2", 2, model="gpt")),
    Run("ring over dp", Case("1f1b", "dp=2", 2, communication="ring")),
    Run("tree over dp", Case("zb-h1", "dp=2", 2, communication="tree")),
    Run("ring and zero 2", Case("1f1b", "dp=2", 2, zero=2, communication="ring")),
    Run("float32", Case("zbv", "pp=2", 4, dtype=SINGLE)),
    Run("float32, tp", Case("1f1b", "tp=2", 2, dtype=SINGLE)),
    Run("compiled", Case("1f1b", "pp=2", 4, model="own", dtype=SINGLE), compiled=True),
    Run("compiled, tp", Case("zb-h1", "tp=2", 2, model="own", dtype=SINGLE), compiled=True),
    Run("offload", Case("1f1b", "pp=2", 4, recompute=(0, 1), offload=1)),
    Run("zero 3 in a pipeline", Case("interleaved-1f1b", "dp=2,pp=2", 2, chunks=2, zero=3, model="tied")),
    Run("tp in a pipeline", Case("zb-h1", "pp=2,tp=2", 3)),
    Run("cp in a pipeline", Case("zb-h1", "pp=2,cp=2", 3, model="tied")),
    Run("ring of four", Case("1f1b", "dp=4", 2, communication="ring")),
    Run("tree of four", Case("1f1b", "dp=4", 2, communication="tree")),
    Run("float32 on four", Case("dualpipe", "dp=2,pp=2", 4, buckets=2, dtype=SINGLE)),
    Run("experts", Case("1f1b", "ep=2", 2, model="experts", clip=0.5)),
    Run("experts in a pipeline", Case("zb-h1", "ep=2,pp=2", 2, model="llama", clip=0.5)),
    Run("experts and tp", Case("1f1b", "ep=2,tp=2", 2, model="switch", sequence_parallel=True, clip=0.5)),
]
OVERLAPPING: Mapping[int, Case] = {
    2: Case("dualpipe-v", "tp=2", 4, chunks=2, overlap=True, model="gpt"),
    4: Case("dualpipe", "pp=2,tp=2", 4, overlap=True, model="gpt"),
    8: Case("interleaved-1f1b", "dp=2,pp=2,tp=2", 4, chunks=2, overlap=True, model="gpt", zero=3),
}
"""Cases trained with overlap and without, by the number of ranks; the turns are settled after two steps."""

FREE = [Run("early receive", SHORT, moves=EARLY_RECEIVE), Run("crossed sends", SHORT, moves=CROSSED_SENDS)]
"""Plans that are free as the runtime wires ranks over NCCL, and on fewer queues would hang."""


def of_schedules(world_size: int) -> list[Run]:
    """Return a run of every schedule, of the package and a user's own."""
    meshes, found = MESHES[world_size], []
    for number, schedule in enumerate((*TRAINING, BY_PAIRS)):
        model = "gpt" if number % 2 or schedule == "seq-1f1b" else "vit"
        chunks, slices = 2 if schedule in ("bfs", "hanayo") else None, 2 if schedule == "seq-1f1b" else 1
        mesh = meshes[number % len(meshes)]
        found.append(Case(schedule, mesh, 2 * world_size, model, chunks=chunks, slices=slices))
    return [Run(str(case), case) for case in found]


def of_the_grid(world_size: int) -> list[Run]:
    """Return a run of every fourth case."""
    return [Run(str(case), case) for case in CASES[::4] if case.world_size == world_size]


def _all() -> Mapping[str, Run]:
    both = [one for case in OVERLAPPING.values() for one in (case, replace(case, overlap=False))]
    sizes = [run for world_size in MESHES for run in (*of_schedules(world_size), *of_the_grid(world_size))]
    return {run.name: run for run in (*sizes, *(Run(str(case), case) for case in both), *FEATURES, *FREE)}


RUNS = _all()
"""All runs by their names, which is how a rank is told of them."""
