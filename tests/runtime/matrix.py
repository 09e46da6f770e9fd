"""The configurations on which the engine has to equal one process: schedules x meshes x what a plan can have besides.

    Case("zb-h1", "dp=2,pp=2", 3, buckets=2)     ─▶ plan, blocks, task: trained here, and in one process

A case says what it is trained on, and in which order its plan adds up the gradients of a weight. Cases alike in that
have to end with the same weights, bit for bit, however different their schedules are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

import torch

import quintsched as qs
from quintsched import torch_csv
from quintsched.ir.instruction_set import Bwd, BwdWeight, Fwd
from quintsched.runtime.blocks.block_costs import estimate_costs
from quintsched.runtime.blocks.block_outlines import Blocks
from quintsched.runtime.models.gpt import GPTOptions, gpt_tied
from quintsched.runtime.stage.build_stages import cut
from quintsched.schedules import Order, Schedule, Shape

from .toys import Outcome, Task, ids_task, tiny_gpt, tiny_vit, train_plainly

FILES = Path(__file__).parents[1] / "data" / "torch_csv"
LENGTH = 8
STEPS = 2

Model = Literal["vit", "gpt", "tied"]


def through_file(plan: qs.Plan) -> qs.Plan:
    """The plan as it comes back from its own file."""
    return qs.Plan.from_json(plan.to_json())


def through_csv(plan: qs.Plan) -> qs.Plan:
    """The plan as it comes back from PyTorch's schedule file, its messages where they were."""
    return torch_csv.loads(torch_csv.dumps(plan), mesh=plan.mesh).plan


def through_bare_csv(plan: qs.Plan) -> qs.Plan:
    """The plan as it comes back from PyTorch's schedule file of computations only."""
    return torch_csv.loads(torch_csv.dumps(plan, compute_only=True), mesh=plan.mesh).plan


def _last_first(rank: int, shape: Shape) -> Order:
    """A user's own GPipe: rank 0 holds the last stage too, and backwards begin with the last microbatch."""
    stages, microbatches = shape.stages_of(rank), range(shape.microbatches)
    yield from (Fwd(stage, microbatch) for stage in stages for microbatch in microbatches)
    yield from (Bwd(stage, microbatch) for stage in reversed(stages) for microbatch in reversed(microbatches))


def _by_pairs(rank: int, shape: Shape) -> Order:
    """A user's own 1F1B: two microbatches forward, the same two back, the second first."""
    pairs = [(first, first + 1) for first in range(0, shape.microbatches, 2)]
    warmup = min(shape.pp - rank - 1, len(pairs))
    for k in range(len(pairs) + warmup):
        if k < len(pairs):
            yield from (Fwd(rank, microbatch) for microbatch in pairs[k])
        if k >= warmup:
            yield from (Bwd(rank, microbatch) for microbatch in reversed(pairs[k - warmup]))


LAST_FIRST = Schedule(
    "last-first", _last_first, summary="own", bubble="?", memory="M", placement=lambda pp, chunks: (*range(pp), 0)
)
BY_PAIRS = Schedule("by-pairs", _by_pairs, summary="own", bubble="?", memory="2P")


def blocks_of(model: Model, depth: int) -> Blocks:
    return tiny_vit(depth) if model == "vit" else tiny_gpt(LENGTH, depth=depth)


def tied_of(model: Model, depth: int) -> Mapping[str, Sequence[str]]:
    return gpt_tied(GPTOptions(depth=depth, tied=model == "tied"))


def task_of(model: Model, microbatches: int, dtype: torch.dtype) -> Task:
    samples = 2 * microbatches
    return Task.make(STEPS, samples, dtype) if model == "vit" else ids_task(STEPS, samples, LENGTH)


@cache
def costs_of(model: Model, depth: int) -> list[float]:
    return estimate_costs(blocks_of(model, depth))


@cache
def train_alone(model: Model, depth: int, microbatches: int, dtype: torch.dtype, clip: float | None) -> Outcome:
    task, blocks = task_of(model, microbatches, dtype), blocks_of(model, depth)
    return train_plainly(task, blocks, microbatches, clip=clip, dtype=dtype, tied=tied_of(model, depth))


@dataclass(frozen=True)
class Case:
    """One configuration.

    `through` is what the plan goes through before it is run; `file` is one of PyTorch's own. Every run of the tests
    takes the cases to try `often` to gloo, the long one takes them all.
    """

    schedule: str | Schedule
    mesh: str
    microbatches: int
    chunks: int | None = None
    slices: int = 1
    buckets: int = 1
    recompute: int | tuple[int, ...] = 0
    zero: int = 0
    offload: float | None = None
    overlap: bool = False
    communication: str = "native"
    model: Model = "vit"
    through: Callable[[qs.Plan], qs.Plan] | None = None
    file: str = ""
    often: bool = False

    def __str__(self) -> str:
        schedule = self.schedule if isinstance(self.schedule, str) else self.schedule.name
        more = {
            "chunks": self.chunks,
            "slices": self.slices if self.slices > 1 else None,
            "buckets": self.buckets if self.buckets > 1 else None,
            "recompute": self.recompute or None,
            "zero": self.zero or None,
            "offload": self.offload,
            "overlap": self.overlap or None,
            "communication": self.communication if self.communication != "native" else None,
            "through": self.through and self.through.__name__.removeprefix("through_"),
        }
        words = [f"{name}={value}".replace(" ", "") for name, value in more.items() if value is not None]
        return "_".join([schedule, self.mesh, f"m={self.microbatches}", self.model, *words])

    @cached_property
    def plan(self) -> qs.Plan:
        if self.file:
            return torch_csv.loads((FILES / self.file).read_text(), mesh=self.mesh).plan
        compiled = qs.compile(
            self.schedule,
            mesh=self.mesh,
            microbatches=self.microbatches,
            chunks=self.chunks,
            slices=self.slices,
            buckets_per_stage=self.buckets,
            recompute=self.recompute,
            zero=self.zero,
            offload=self.offload,
            overlap=self.overlap,
            communication=self.communication,
            tied=self._tied_stages(),
        )
        return self.through(compiled) if self.through else compiled

    def _tied_stages(self) -> dict[str, tuple[int, int]]:
        last = qs.Mesh.parse(self.mesh).pp * (self.chunks or 1) - 1
        return {"embedding": (0, last)} if self.model == "tied" and last else {}

    @property
    def world_size(self) -> int:
        return qs.Mesh.parse(self.mesh).size

    @property
    def pipeline_only(self) -> bool:
        return self.world_size == qs.Mesh.parse(self.mesh).pp

    @property
    def in_step(self) -> int:
        """Number of microbatches of all replicas together in a step."""
        mesh = qs.Mesh.parse(self.mesh)
        return self.microbatches * mesh.axis_size("dp") * mesh.axis_size("ep")

    @property
    def depth(self) -> int:
        """Enough blocks for every stage; few depths, so that cases can be compared."""
        return 6 if max(map(self.plan.layout.part_of, range(len(self.plan.stage_to_pp)))) < 8 else 14

    @property
    def blocks(self) -> Blocks:
        return blocks_of(self.model, self.depth)

    @property
    def tied(self) -> Mapping[str, Sequence[str]]:
        return tied_of(self.model, self.depth)

    def task(self, dtype: torch.dtype) -> Task:
        return task_of(self.model, self.in_step, dtype)

    def alone(self, dtype: torch.dtype, clip: float | None = None) -> Outcome:
        """Return the result of one process; tied weights under all their names."""
        return train_alone(self.model, self.depth, self.in_step, dtype, clip)

    @property
    def orders(self) -> tuple[frozenset[tuple[int, ...]], ...]:
        """Per block, the order in which microbatches add to its gradients; twins have an order each."""
        added: dict[int, list[int]] = {stage: [] for stage in range(len(self.plan.stage_to_pp))}
        for i in (i for program in self.plan.programs for i in program if isinstance(i, Bwd | BwdWeight)):
            added[i.stage].append(i.microbatch)
        cuts = cut(costs_of(self.model, self.depth), self.plan.layout)
        holders = [[stage for stage, held in enumerate(cuts) if block in held] for block in range(self.depth + 2)]
        return tuple(frozenset(tuple(added[stage]) for stage in stages) for stages in holders)

    @property
    def sums(self) -> tuple[object, ...]:
        """All that rounding depends on: cases of which this is the same have to end with the same bits.

        Where replicas share out gradients, it also depends on when those are reduced.
        """
        mesh = qs.Mesh.parse(self.mesh)
        axes = tuple(mesh.axis_size(name) for name in ("dp", "cp", "ep", "tp"))
        reduced = str(self) if self.zero > 1 else ""
        return self.model, self.depth, axes, self.slices, bool(self.plan.tied), self.orders, reduced

    @property
    def adds_as_alone(self) -> bool:
        """Whether its additions are those of one process, one microbatch after the other."""
        in_turn = frozenset({tuple(range(self.microbatches))})
        return self.pipeline_only and self.slices == 1 and not self.plan.tied and set(self.orders) == {in_turn}


ONE_RANK = [
    Case("1f1b", "pp=1", 8),
    Case("gpipe", "pp=1", 5, recompute=1),
    Case("zb-h1", "pp=1", 4),
    Case("zb-auto", "pp=1", 4, model="gpt"),
    Case("interleaved-1f1b", "pp=1", 4, chunks=3),
    Case("interleaved-zb", "pp=1", 3, chunks=2, recompute=2),
    Case("bfs", "pp=1", 3, chunks=2, model="tied"),
    Case("zbv", "pp=1", 4, model="gpt"),
    Case("seq-1f1b", "pp=1", 2, slices=4, model="gpt"),
    Case("1f1b", "pp=1", 3, model="tied"),
]

TWO_RANKS = [
    Case("1f1b", "pp=2", 5),
    Case("gpipe", "pp=2", 5, model="gpt"),
    Case("eager-1f1b", "pp=2", 4),
    Case("bfs", "pp=2", 5, chunks=2),
    Case("interleaved-1f1b", "pp=2", 4, chunks=2),
    Case("interleaved-zb", "pp=2", 4, chunks=3),
    Case("zb-h1", "pp=2", 5),
    Case("zb-h2", "pp=2", 4, model="gpt"),
    Case("zb-auto", "pp=2", 4),
    Case("zbv", "pp=2", 4, recompute=1),
    Case("v-half", "pp=2", 4),
    Case("v-min", "pp=2", 5, model="gpt"),
    Case("hanayo", "pp=2", 4, chunks=4),
    Case("dualpipe", "pp=2", 4),
    Case("dualpipe-v", "pp=2", 4),
    Case("seq-1f1b", "pp=2", 2, slices=4, model="gpt", recompute=1),
    Case("1f1b", "pp=2", 4, recompute=(1, 0)),
    Case("1f1b", "pp=2", 3, model="tied", often=True),
    Case("zbv", "pp=2", 4, chunks=2, model="tied"),
    Case("1f1b", "dp=2", 3),
    Case("zb-h1", "dp=2", 3, buckets=2, often=True),
    Case("1f1b", "tp=2", 3),
    Case("zb-h2", "tp=2", 3, recompute=1),
    Case("seq-1f1b", "tp=2", 2, slices=2, model="gpt", often=True),
    Case("gpipe", "ep=2", 3),
    Case("1f1b", "cp=2", 3, model="gpt"),
    Case("zb-h1", "cp=2", 3, model="tied", recompute=1),
    Case(BY_PAIRS, "pp=2", 4),
    Case("zb-h1", "pp=2", 4, through=through_file),
    Case("interleaved-1f1b", "pp=2", 4, chunks=2, through=through_csv),
    Case("zbv", "pp=2", 4, through=through_bare_csv),
    Case("titan", "pp=2", 8, file="titan_2-rank_9920276.csv"),
    Case("titan-comms", "pp=2", 4, file="titan_example_interleaved_2rank_4mb_comms.csv", often=True),
    Case("zb1p-comms", "pp=2", 8, file="zb1p_2rank_2stagep_comms.csv"),
]

THREE_RANKS = [
    Case("1f1b", "pp=3", 5),
    Case("zbv", "pp=3", 4),
    Case(LAST_FIRST, "pp=3", 4),
    Case("interleaved-zb", "pp=3", 3, chunks=2, model="gpt"),
]

FOUR_RANKS = [
    Case("1f1b", "pp=4", 2),
    Case("gpipe", "pp=4", 5),
    Case("eager-1f1b", "pp=4", 6, model="gpt"),
    Case("bfs", "pp=4", 4, chunks=3),
    Case("interleaved-1f1b", "pp=4", 8, chunks=2, recompute=1),
    Case("interleaved-zb", "pp=4", 4, chunks=2),
    Case("zb-h1", "pp=4", 5, model="tied"),
    Case("zb-h2", "pp=4", 7),
    Case("zb-auto", "pp=4", 5),
    Case("zbv", "pp=4", 8, often=True),
    Case("v-half", "pp=4", 5, model="gpt"),
    Case("v-min", "pp=4", 8),
    Case("dualpipe", "pp=4", 8, recompute=2),
    Case("dualpipe-v", "pp=4", 8),
    Case("seq-1f1b", "pp=4", 3, slices=2, model="gpt"),
    Case("dualpipev-file", "pp=4", 10, file="dualpipev_4rank_10mb.csv"),
    Case("1f1b", "dp=2,pp=2", 3, buckets=2),
    Case("1f1b", "pp=2,dp=2", 3),
    Case("1f1b", "tp=2,pp=2", 3),
    Case("zb-h1", "pp=2,tp=2", 3, often=True),
    Case("zb-h1", "dp=2,pp=2", 3),
    Case("dualpipe", "dp=2,pp=2", 4, buckets=2, often=True),
    Case("v-half", "dp=2,pp=2", 3, model="gpt"),
    Case("dualpipe-v", "pp=2,tp=2", 4),
    Case("seq-1f1b", "dp=2,pp=2", 2, slices=2, model="gpt"),
    Case("interleaved-1f1b", "dp=2,pp=2", 2, chunks=2, model="tied", often=True),
    Case("zb-h2", "dp=2,tp=2", 3),
    Case("gpipe", "dp=4", 2),
    Case("1f1b", "tp=4", 2),
    Case("1f1b", "cp=4", 2, model="gpt"),
    Case("zb-h1", "pp=2,cp=2", 3, model="tied"),
    Case("interleaved-1f1b", "cp=2,pp=2", 4, chunks=2, model="gpt"),
    Case("zb-h1", "dp=2,pp=2", 3, through=through_csv),
    Case(BY_PAIRS, "dp=2,pp=2", 4, recompute=1),
]

MORE_RANKS = [
    Case("1f1b", "dp=3,pp=2", 2),
    Case("zbv", "pp=3,tp=2", 3),
    Case("1f1b", "dp=2,pp=2,tp=2", 3),
    Case("zb-h1", "tp=2,dp=2,pp=2", 3, recompute=1),
    Case("interleaved-zb", "pp=2,tp=2,dp=2", 2, chunks=2, buckets=2),
    Case("zbv", "dp=2,pp=2,tp=2", 3),
    Case("dualpipe", "tp=2,pp=2,dp=2", 4),
    Case("seq-1f1b", "dp=2,pp=2,tp=2", 2, slices=2, model="gpt"),
    Case("gpipe", "dp=2,ep=2,pp=2", 2),
    Case("1f1b", "dp=2,cp=2,tp=2", 2, model="gpt"),
    Case("eager-1f1b", "dp=4,pp=2", 2),
    Case("v-min", "dp=2,pp=4", 4),
    Case("bfs", "tp=2,pp=4", 3, chunks=2, model="gpt"),
    Case("zb-auto", "dp=2,pp=4", 4),
    Case("1f1b", "pp=8", 9),
    Case("zb-h2", "pp=8", 8),
    Case("dualpipe", "pp=8", 16),
    Case("zbv", "pp=8", 8),
    Case("titan", "pp=8", 10, file="titan_8-rank_9920276.csv"),
]

SHARED_OUT = [
    Case("1f1b", "dp=2,pp=2", 3, zero=1, buckets=2),
    Case("zb-h1", "dp=2,pp=2", 3, zero=2),
    Case("interleaved-1f1b", "dp=2,pp=2", 2, chunks=2, zero=3, model="tied"),
    Case("gpipe", "dp=4", 2, zero=3, model="gpt"),
]

OFFLOADED = [
    Case("gpipe", "pp=1", 5, offload=2),
    Case("1f1b", "pp=2", 4, recompute=(0, 1), offload=1, often=True),
    Case("zbv", "pp=2", 4, chunks=2, offload=1.5),
    Case("dualpipe", "pp=2", 4, offload=2),
    Case("seq-1f1b", "pp=2", 2, slices=4, model="gpt", offload=0.25),
    Case("1f1b", "pp=4", 8, offload=2, through=through_file),
    Case("interleaved-1f1b", "dp=2,pp=2", 2, chunks=2, model="tied", offload=0.5),
    Case("eager-1f1b", "pp=2,tp=2", 3, offload=1),
    Case("1f1b", "dp=2,pp=2", 3, zero=3, offload=1),
]

BOTH_WAYS = [Case("chimera", "pp=2", 4), Case("chimera", "dp=2,pp=2", 4, buckets=2)]

CASES = [*ONE_RANK, *TWO_RANKS, *THREE_RANKS, *FOUR_RANKS, *MORE_RANKS, *SHARED_OUT, *OFFLOADED, *BOTH_WAYS]

OVERLAPPING: Mapping[int, Case] = {
    2: Case("dualpipe-v", "tp=2", 4, chunks=2, overlap=True, model="gpt"),
    4: Case("dualpipe", "pp=2,tp=2", 4, overlap=True, model="gpt"),
    8: Case("interleaved-1f1b", "dp=2,pp=2,tp=2", 4, chunks=2, overlap=True, model="gpt", zero=3),
}
"""Cases trained with overlap and without, by the number of ranks; the turns are settled after two steps."""
