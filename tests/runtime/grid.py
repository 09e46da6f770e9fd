"""The one grid of trainings: a case is a schedule, a mesh, a model, what a plan has, and how the engine runs it.

    Case("zb-h1", "dp=2,pp=2", 4, "gpt", buckets=2) ─┬▶ train     ─▶ a `Trained` of each rank     the engine
                                                     └▶ alone     ─▶ the one that they equal      helpers/training.py

A case says what it is trained on, and in which order its plan adds up the gradients of a weight: cases that add alike
end with the same bits, whatever their schedules are. Cases of every day and of the long proofs are in grid_cases.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import quintsched as qs
from quintsched import torch_csv
from quintsched.collectives import Wire
from quintsched.ir.instruction_set import Bwd, BwdWeight
from quintsched.runtime import Engine, Transport, run_local
from quintsched.runtime.blocks.block_builders import Blocks
from quintsched.runtime.blocks.block_costs import estimate_costs
from quintsched.runtime.models.gpt import GPTOptions, gpt_tied
from quintsched.runtime.parallel.expert.moe import mixtures
from quintsched.runtime.parallel.mesh_independent_dropout import Masks
from quintsched.runtime.stage.build_stages import cut
from quintsched.runtime.train.built_in_losses import correct_sum

from ..helpers.training import Outcome, call_with_share, difference, train_alone
from .grid_models import EXPERTS, OPTIMIZERS, SHAPES, TIED, TWO_CHUNKS, blocks_of, ce_mean, ce_sum
from .toys import CLASSES

FILES = Path(__file__).parents[1] / "data" / "torch_csv"
STEPS = 2
LEAST = -1.0
"""Offload as much as can be."""


@dataclass(frozen=True)
class Case:
    """One training: its plan, its model, and how the engine runs it."""

    schedule: str | qs.Schedule
    mesh: str
    microbatches: int = 4
    model: str = "vit"
    # of the plan
    chunks: int | None = None
    slices: int = 1
    buckets: int = 1
    recompute: int | tuple[int, ...] = 0
    every_second: bool = False
    """Whether stages that recompute do so for every second microbatch only."""
    zero: int = 0
    zero_every: int = 1
    offload: float | None = None
    lend: float | None = None
    overlap: bool = False
    communication: str = "native"
    nodes: int | None = None
    where: tuple[int, ...] | None = None
    stages: tuple[int, ...] | None = None
    through: Callable[[qs.Plan], qs.Plan] | None = None
    """Function that the plan goes through before it is run."""
    file: str = ""
    """Name of a schedule file of PyTorch's own."""
    # of the run
    steps: int = STEPS
    dtype: torch.dtype = torch.float64
    optimizer: str = "sgd"
    clip: float | None = None
    bucket_mb: float = 25.0
    mean: bool = False
    uneven: bool = False
    accumulates: bool = False
    """Whether two calls make one step of the optimizer."""
    sequence_parallel: bool = False
    context: str = "ring"
    wire: str = "nccl"
    depth: int = 0
    """Number of layers; 0: enough for every stage, and few choices, so that cases can be compared."""

    def __str__(self) -> str:
        schedule = self.schedule if isinstance(self.schedule, str) else self.schedule.name
        words = [schedule, self.mesh, f"m={self.microbatches}", self.model]
        for one in fields(self)[4:]:
            value = getattr(self, one.name)
            if value != one.default:
                said = getattr(value, "__name__", str(value)).removeprefix("through_").removeprefix("torch.")
                words.append(one.name if value is True else f"{one.name}={said}".replace(" ", ""))
        return "_".join(words).replace(" ", "-")

    @cached_property
    def plan(self) -> qs.Plan:
        if self.file:
            return torch_csv.loads((FILES / self.file).read_text(), mesh=self.mesh).plan
        same = ("mesh", "microbatches", "chunks", "slices", "recompute", "zero", "overlap", "communication", "stages")
        told: dict[str, Any] = {name: getattr(self, name) for name in same}
        told |= {"zero_every": self.zero_every} if self.zero_every > 1 else {}
        told |= {"recompute_microbatches": range(0, self.microbatches, 2)} if self.every_second else {}
        told |= {"wire": Wire(nodes=self.nodes)} if self.nodes else {}
        offload = self._least_offload() if self.offload == LEAST else self.offload
        told |= {"buckets_per_stage": self.buckets, "stage_to_pp": self.where}
        told |= {"offload": offload, "lend": self.lend}
        compiled = qs.compile(self.schedule, tied=self._tied_stages(), **told)
        return self.through(compiled) if self.through else compiled

    def _least_offload(self) -> float:
        for offload in (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0):
            with suppress(qs.UsageError):
                _ = replace(self, offload=offload).plan
                return offload
        return 8.0

    def _tied_stages(self) -> dict[str, tuple[int, int]]:
        chunks = self.chunks or (2 if self.schedule in TWO_CHUNKS else 1)
        holders = [stage for stage, blocks in enumerate(self.stages or ()) if blocks]
        last = holders[-1] if holders else self.size("pp") * chunks - 1
        return {"embedding": (0, last)} if self.model in TIED and last else {}

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return qs.Mesh.parse(self.mesh).axis_size(axis)

    @property
    def world_size(self) -> int:
        return qs.Mesh.parse(self.mesh).size

    @property
    def replicas(self) -> int:
        return self.size("dp") * self.size("ep")

    @property
    def length(self) -> int:
        """Tokens of a sequence, which two chunks on each rank of cp divide."""
        return 12 if self.size("cp") == 3 else 8

    @property
    def in_one(self) -> int:
        """Number of microbatches of one process: those of all replicas, or one where batches do not divide."""
        return 1 if self.uneven or self.accumulates else self.microbatches * self.replicas

    @property
    def layers(self) -> int:
        parts = 1 + max(map(self.plan.layout.part_of, range(len(self.plan.stage_to_pp))))
        return self.depth or next(depth for depth in (2, 6, 14, 30) if depth + 2 >= parts)

    @property
    def tied(self) -> Mapping[str, Sequence[str]]:
        return gpt_tied(GPTOptions(depth=self.layers, tied=self.model in TIED))

    def blocks(self, *, pads: bool = True) -> Blocks:
        return blocks_of(self.model, self.layers, self.length, self.dtype, pads=pads)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Return whole batches, of all replicas; some targets do not count. The last one is evaluated."""
        random, made = torch.Generator().manual_seed(0), []
        for step in range((2 if self.accumulates else 1) * self.steps + 1):
            count = self.replicas * (2 * self.microbatches + ((3 * step + 1) % 4 if self.uneven else 0))
            if self.model in SHAPES:
                inputs = torch.randn(count, *SHAPES[self.model], generator=random, dtype=torch.float64).to(self.dtype)
                targets = torch.randint(0, CLASSES, (count,), generator=random)
            else:
                ids = torch.randint(0, CLASSES, (count, self.length + 1), generator=random)
                inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].clone()
            ignored = torch.rand(targets.shape, generator=random) < 0.2
            ignored.view(count, -1)[:, 0] = False
            made.append((inputs, torch.where(ignored, -100, targets)))
        return made

    def calls(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Return the batches of each step, one for each call of the engine."""
        batches, each = self.batches()[:-1], 2 if self.accumulates else 1
        return [batches[first : first + each] for first in range(0, len(batches), each)]

    @property
    def tolerance(self) -> float:
        if self.dtype != torch.float64:
            return 2e-5
        return 1e-12 if self.optimizer == "sgd" else 1e-10

    def alone(self) -> Trained:
        """Return the result of one process, which all cases of the same numbers share."""
        replicas = self.replicas if self.uneven else 1
        mesh = f"dp={replicas},cp=3" if self.length == 12 else f"dp={replicas}"
        same = ("model", "steps", "dtype", "optimizer", "clip", "uneven", "accumulates")
        told = {name: getattr(self, name) for name in same}
        microbatches = self.microbatches * self.replicas // replicas
        return train_alone_once(Case("1f1b", mesh, microbatches, depth=self.layers, **told))

    @property
    def orders(self) -> tuple[frozenset[tuple[int, ...]], ...]:
        """Per block, the order in which microbatches add to its gradients; twins have an order each."""
        added: dict[int, list[int]] = {stage: [] for stage in range(len(self.plan.stage_to_pp))}
        for i in (i for program in self.plan.programs for i in program if isinstance(i, Bwd | BwdWeight)):
            added[i.stage].append(i.microbatch)
        cuts = cut(costs_of(self.model, self.layers, self.length), self.plan.layout)
        holders = [[stage for stage, held in enumerate(cuts) if block in held] for block in range(self.layers + 2)]
        return tuple(frozenset(tuple(added[stage]) for stage in stages) for stages in holders)

    @property
    def sums(self) -> tuple[object, ...]:
        """All that rounding depends on: cases of which this is the same have to end with the same bits.

        Where replicas share out gradients, it also depends on when those are reduced.
        """
        axes = tuple(map(self.size, ("dp", "cp", "ep", "tp")))
        reduced = str(self) if self.zero > 1 or self.communication != "native" else ""
        return axes, self.slices, self.sequence_parallel, self.context, bool(self.plan.tied), self.orders, reduced

    @property
    def adds_as_alone(self) -> bool:
        """Whether its additions are those of one process, one microbatch after the other."""
        in_turn = frozenset({tuple(range(self.microbatches))})
        is_pipeline = self.world_size == self.size("pp") and self.slices == 1 and not self.plan.tied
        return is_pipeline and not self._adds_more and set(self.orders) == {in_turn}

    @property
    def _adds_more(self) -> bool:
        """Whether figures of several stages or microbatches are added up that bits may depend on."""
        return bool(self.clip or self.mean or self.uneven or self.accumulates or self.model in EXPERTS)

    def twin(self) -> Case | None:
        """Return the plainest case with the same additions, unless it is this one, or there is none."""
        if self.overlap:
            return replace(self, overlap=False)
        if self._adds_more or self.file:
            return None
        schedule = "seq-1f1b" if self.slices > 1 else "1f1b"
        plain = replace(
            self, schedule=schedule, chunks=None, buckets=1, recompute=0, every_second=False, zero=0, offload=None,
            lend=None,
            overlap=False, through=None, where=None, stages=None, zero_every=1, depth=self.layers,
        )  # fmt: skip
        return plain if plain.plan != self.plan and plain.sums == self.sums else None


@cache
def costs_of(model: str, depth: int, length: int) -> list[float]:
    return estimate_costs(blocks_of(model, depth, length, torch.float64))


@dataclass(frozen=True)
class Trained(Outcome):
    """An outcome with the gradients given to the last step of the optimizer, and the rows that experts were given."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)


@cache
def train_alone_once(case: Case) -> Trained:
    """Train in one process, on microbatches or on whole batches, with the masks of dropouts."""
    gradients: dict[str, Tensor] = {}
    tokens: dict[str, list[int]] = {}

    def note(model: Any, step: int) -> None:
        held = model.named_parameters(remove_duplicate=False)
        gradients.update((name, p.grad.clone()) for name, p in held if p.grad is not None)
        tokens.update({name: layer.expert_tokens.tolist() for name, layer in mixtures(model).items()})

    steps = [tuple(map(torch.cat, zip(*calls, strict=True))) for calls in case.calls()]
    how: dict[str, Any] = {"dtype": case.dtype, "clip": case.clip, "tied": case.tied, "masks": Masks(0)}
    found = train_alone(
        case.blocks(pads=False), ce_sum, OPTIMIZERS[case.optimizer], steps, microbatches=case.in_one, after=note,
        evaluated=case.batches()[-1], **how,
    )  # fmt: skip
    return Trained(**vars(found), gradients=gradients, tokens=tokens)


def train_rank(case: Case, transport: Transport, plan: qs.Plan | None = None, **settings: Any) -> Trained:
    """Train with the engine on one rank of the case's plan, or another; `settings` go before those of the case."""
    noted: list[tuple[Tensor, Tensor]] = []

    def optimizer(weights: Any) -> torch.optim.Optimizer:
        made = OPTIMIZERS[case.optimizer](weights)

        def note(stepped: torch.optim.Optimizer, *_: object) -> None:
            held = (p for group in stepped.param_groups for p in group["params"])
            noted.extend((p, p.grad.clone()) for p in held if p.grad is not None)

        made.register_step_pre_hook(note)
        made.needs_whole_parameters = False  # type: ignore[attr-defined]
        return made

    told: dict[str, Any] = {"clip": case.clip, "bucket_mb": case.bucket_mb, "dtype": case.dtype, "tied": case.tied}
    told |= {"sequence_parallel": case.sequence_parallel, "context": case.context, "metrics": {"accuracy": correct_sum}}
    loss: Any = ce_mean if case.mean else ce_sum
    engine = Engine(plan or case.plan, case.blocks(), loss, optimizer, transport=transport, **told | settings)
    losses, norms = [], []
    for calls in case.calls():
        noted.clear()
        results = [call_with_share(engine, partial(engine.step, last=batch is calls[-1]), batch) for batch in calls]
        losses.append(results[-1].with_earlier(results[:-1]).loss.item())
        norms += [] if results[-1].grad_norm is None else [results[-1].grad_norm.item()]
    tokens = {name: rows.tolist() for name, rows in engine.expert_tokens().items()}
    losses.append(call_with_share(engine, engine.evaluate, case.batches()[-1]).loss.item())
    weights, gradients = engine.full_weights(), {}
    if case.zero not in (1, 2):  # of which each rank has a shard
        with torch.no_grad():
            for parameter, gradient in noted:
                parameter.copy_(gradient)
        gradients = engine.full_weights()
    return Trained(losses, weights, norms, gradients=gradients, tokens=tokens)


def train(case: Case, **settings: Any) -> list[Trained]:
    """Train with the engine on every rank, in this process."""
    work = partial(train_rank, case, **settings)
    return run_local(case.world_size, work, timeout_s=300, rules=case.wire)  # type: ignore[arg-type]


def differences(ranks: Sequence[Trained], alone: Trained) -> dict[str, float]:
    """Return the largest ones of any rank from one process; every weight must be held by some rank."""
    assert {name for rank in ranks for name in rank.weights} == set(alone.weights)
    norms, losses = _doubles(alone.norms), _doubles(alone.losses)
    assert not alone.norms or all(len(rank.norms) == len(norms) for rank in ranks)
    return {
        "losses": _largest(difference(_doubles(rank.losses), losses) for rank in ranks),
        "norms": _largest(difference(_doubles(rank.norms) / norms, torch.ones(len(norms))) for rank in ranks)
        if alone.norms
        else 0.0,
        "gradients": _largest(
            difference(gradient, alone.gradients[name])
            for rank in ranks
            for name, gradient in rank.gradients.items()
            if name in alone.gradients
        ),
        "weights": _largest(difference(w, alone.weights[name]) for rank in ranks for name, w in rank.weights.items()),
    }


def _doubles(figures: Iterable[float]) -> Tensor:
    return torch.tensor([*figures], dtype=torch.float64)


def _largest(figures: Iterable[float]) -> float:
    """Return the largest, or what is not a number: Python's own `max` may pass over that."""
    return float(_doubles((0.0, *figures)).max())


def require_equality(case: Case, **settings: Any) -> list[Trained]:
    """Require losses, norms, gradients, weights and rows of experts of one process; return those of the ranks."""
    ranks = train(case, **settings)
    require_equal(case, ranks)
    return ranks


def require_equal(case: Case, ranks: Sequence[Trained]) -> None:
    """Require what ranks ended with to be what one process ends with."""
    alone = case.alone()
    found = differences(ranks, alone)
    assert all(value <= case.tolerance for value in found.values()), found
    assert all(rank.tokens == alone.tokens for rank in ranks if not case.uneven)
