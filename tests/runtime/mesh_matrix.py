"""Meshes of all five axes as data, what is trained on them, and the same in one process.

    Case("zb-h1", "cp=2,pp=2,tp=2", "llama", True)  ─┬▶ train_on      ─▶ a `Trained` from each rank
                                                     └▶ train_alone   ─▶ the one that they have to equal

The model is always a transformer with experts, whose routers and attention prefer some tokens to others, with dropout
outside of attention and both auxiliary losses; gradients are clipped. Models come round by five, schedules by three
where there is a pipeline and by two where there is none, so that no axis always meets the same of them.

In float32 a token goes to all experts: where two are nearly alike, rounding would decide which one of them it goes to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import combinations, cycle, product
from math import lcm
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.blocks.block_outlines import build_model
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.models.gpt import GPTOptions, gpt_tied
from quintsched.runtime.parallel.dropout import Masks
from quintsched.runtime.train.summed_losses import cross_entropy_sum

from ..helpers import training
from .parallel.expert.moe_training import moe_blocks
from .toys import Task, cross_entropy_plainly, difference, ids_task, share

DEPTH, CLIP, MICROBATCHES = 2, 0.5, 2
AXES = ("dp", "pp", "tp", "cp", "ep")
LLAMA = {"positions": "rope", "norm": "rmsnorm", "activation": "swiglu", "heads": 8, "kv_heads": 4}
QWEN = {"head_size": 4, "ffn": 24, "mlp_ratio": None, "biases": False, "qk_norm": True, "rope_base": 500.0}
PADDED = {"capacity_factor": 8.0, "pad_to_capacity": True}
"""Every expert is given a row of each token; in one process, which does without that, none is dropped either."""
MODELS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gpt": {"dropout": 0.1},
        "llama": LLAMA | {"dropout": 0.2, "shared_experts": 1, "renormalise": True},
        "tied": {"dropout": 0.3, "tied": True, "every": 2},
        "switch": PADDED | {"dropout": 0.1, "top_k": 1, "experts": 8, "positions": "rope", "activation": "swiglu"},
        "tied qwen": LLAMA | QWEN | {"dropout": 0.1, "tied": True, "top_k": 3},
    }
)
MORE_SIZES = (
    "cp=3",
    "tp=4",
    "pp=4",
    "ep=4,dp=2",
    "cp=4,tp=2",
    "dp=3,tp=2,pp=2",
    "pp=3,tp=2,dp=2",
    "cp=3,pp=2,tp=2",
    "cp=2,dp=3,ep=2",
    "tp=4,ep=2,cp=2",
    "ep=4,pp=2,tp=2",
    "pp=2,cp=4,ep=2",
    "dp=2,ep=2,pp=2,tp=2",
    "pp=2,cp=2,dp=2,ep=2",
    "tp=2,ep=2,dp=2,cp=2",
    "ep=2,tp=2,cp=2,pp=2",
)


@dataclass(frozen=True)
class Case:
    """A mesh, and what is trained on it how."""

    schedule: str
    mesh: str
    model: str
    sequence_parallel: bool
    microbatches: int = MICROBATCHES
    overlap: bool = False
    zero: int = 0

    def __str__(self) -> str:
        return f"{self.schedule} {self.mesh} {self.model}{' sp' if self.sequence_parallel else ''}"

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return qs.Mesh.parse(self.mesh).axis_size(axis)

    @property
    def ranks(self) -> int:
        return qs.Mesh.parse(self.mesh).size

    @property
    def chunks(self) -> int | None:
        return 2 if self.schedule in ("interleaved-1f1b", "dualpipe-v") else None

    @cached_property
    def plan(self) -> qs.Plan:
        stages = self.size("pp") * (self.chunks or 1)
        ties = {"embedding": (0, stages - 1)} if self.is_tied and stages > 1 else {}
        return qs.compile(
            self.schedule,
            mesh=self.mesh,
            microbatches=self.microbatches,
            chunks=self.chunks,
            tied=ties,
            overlap=self.overlap,
            zero=self.zero,
        )

    @property
    def is_tied(self) -> bool:
        return bool(MODELS[self.model].get("tied"))

    @property
    def alone(self) -> tuple[str, int, int]:
        """Settings that determine its numbers: model, microbatches of all replicas, length of sequences."""
        return self.model, self.size("dp") * self.size("ep") * self.microbatches, 12 if self.size("cp") == 3 else 8


def _meshes() -> Iterator[tuple[str, bool]]:
    """Yield meshes, and whether tokens are shared out over tp: every other time where there is tp, or always both."""
    shares = cycle((True, False))
    for count in (1, 2, 3):
        for place, axes in enumerate(combinations(AXES, count)):
            turned = axes[place % count :] + axes[: place % count]
            yield ",".join(f"{axis}=2" for axis in turned), "tp" in axes and next(shares)
    for mesh in MORE_SIZES:
        yield mesh, "tp" in mesh and next(shares)
    for sizes, both in product(product((1, 2), repeat=4), (False, True)):
        yield ",".join(f"{axis}={size}" for axis, size in zip(AXES[:4], sizes, strict=True)), both
    for both in (False, True):
        yield "dp=2,ep=2,pp=2,cp=2,tp=2", both


def _cases() -> Iterator[Case]:
    """Yield all cases; only pipelines of two ranks have blocks enough for two chunks on each."""
    by_pp = {1: cycle(("zb-h1", "1f1b")), 2: cycle(("1f1b", "interleaved-1f1b", "zb-h1"))}
    longer = cycle(("zb-h1", "1f1b"))
    for (mesh, shares), model in zip(_meshes(), cycle(MODELS), strict=False):
        schedule = next(by_pp.get(qs.Mesh.parse(mesh).axis_size("pp"), longer))
        yield Case(schedule, mesh, model, shares)


CASES = list(_cases())
"""All of them, for the long proof."""
QUICK = [case for case in CASES if case.ranks <= 16][2::3]
"""Some of them, for every day."""
IN_FLOAT32, QUICK_IN_FLOAT32 = CASES[2::3], QUICK[::2]
"""Cases of both that are trained in float32 too."""


@dataclass(frozen=True)
class Trained:
    """Results of training, on one rank or alone; whole tensors by their names in the whole model."""

    losses: list[float]
    """Of every step."""
    norms: list[float]
    """Of the gradients of every step, before they are clipped."""
    gradients: dict[str, Tensor]
    """Gradients given to the last step of the optimizer."""
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Differences:
    """The largest ones of any rank from one process: of norms relative, of the rest as `difference` says."""

    losses: float
    norms: float
    gradients: float
    weights: float

    @classmethod
    def of(cls, ranks: Sequence[Trained], alone: Trained) -> Differences:
        """Compare; every weight must be held by some rank, and every rank have a figure for every step."""
        assert {name for rank in ranks for name in rank.weights} == set(alone.weights)
        assert all(rank.weights.keys() == rank.gradients.keys() for rank in ranks)
        norms = _doubles(alone.norms)
        return cls(
            _largest(difference(_doubles(rank.losses), _doubles(alone.losses)) for rank in ranks),
            _largest(float(((_doubles(rank.norms) - norms) / norms).abs().max()) for rank in ranks),
            _largest(difference(g, alone.gradients[name]) for rank in ranks for name, g in rank.gradients.items()),
            _largest(difference(w, alone.weights[name]) for rank in ranks for name, w in rank.weights.items()),
        )


def _doubles(figures: Iterable[float]) -> Tensor:
    return torch.tensor([*figures], dtype=torch.float64)


def _largest(figures: Iterable[float]) -> float:
    """Return the largest, or what is not a number: Python's own `max` may pass over that."""
    return float(_doubles(figures).max())


class NotingSGD(torch.optim.SGD):
    """SGD that keeps the gradients which it was given last."""

    needs_whole_parameters = False

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self.noted: list[tuple[Tensor, Tensor]] = []

    def step(self, closure: Any = None) -> None:
        """Note the gradients, and step."""
        self.noted = [(p, p.grad.clone()) for group in self.param_groups for p in group["params"] if p.grad is not None]
        super().step(closure)


def task_of(steps: int, microbatches: int, length: int) -> Task:
    """Batches that `microbatches` divide, of at least 8 samples."""
    return ids_task(steps, lcm(8, microbatches), length)


def options_of(model: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the options that the model is built with."""
    options = {"experts": 4, "balance": 0.05, "z": 0.01, **MODELS[model]}
    return options | ({"top_k": options["experts"]} if dtype == torch.float32 else {})


def ties_of(model: str) -> dict[str, tuple[str, ...]]:
    """Return the weights of it that are tied."""
    return gpt_tied(GPTOptions(depth=DEPTH, tied=bool(MODELS[model].get("tied"))))


def train_on(case: Case, steps: int, dtype: torch.dtype) -> list[Trained]:
    """Train with the engine, on every rank of the case's plan, by NCCL's rules."""
    return run_local(case.ranks, partial(train_rank, case, steps, dtype), timeout_s=600, rules="nccl")


def train_rank(case: Case, steps: int, dtype: torch.dtype, transport: Transport) -> Trained:
    """Train with the engine on one rank of the case's plan."""
    model, microbatches, length = case.alone
    task, blocks = task_of(steps, microbatches, length), moe_blocks(length, **options_of(model, dtype))
    engine = Engine(
        case.plan,
        blocks,
        cross_entropy_sum,
        NotingSGD,
        clip=CLIP,
        bucket_mb=0.01,
        dtype=dtype,
        sequence_parallel=case.sequence_parallel,
        tied=ties_of(model),
        transport=transport,
    )
    results = [engine.step(*share(engine, *step)) for step in zip(task.inputs, task.targets, strict=True)]
    losses = [result.loss.item() for result in results]
    norms = [result.grad_norm.item() for result in results if result.grad_norm is not None]
    weights = engine.full_weights()
    return Trained(losses, norms, _full_gradients(engine), weights)


@torch.no_grad()
def _full_gradients(engine: Engine) -> dict[str, Tensor]:
    """Return the last gradients as the engine puts weights together: in their place."""
    for optimizer in engine.optimizers.values():
        assert isinstance(optimizer, NotingSGD)
        for parameter, gradient in optimizer.noted:
            parameter.copy_(gradient)
    return engine.full_weights()


@cache
def train_alone(model: str, microbatches: int, length: int, steps: int, dtype: torch.dtype) -> Trained:
    """Do in one process what a case does that depends on this."""
    options = {name: value for name, value in options_of(model, dtype).items() if name not in PADDED}
    return train_plainly(model, options, task_of(steps, microbatches, length), microbatches, dtype)


def train_plainly(
    name: str, options: Mapping[str, Any], task: Task, microbatches: int, dtype: torch.dtype, seed: int = 0
) -> Trained:
    """Train in one process; dropouts draw by the engine's masks, of `seed`."""
    steppers: list[NotingSGD] = []

    def optimizer(parameters: Any) -> NotingSGD:
        steppers.append(NotingSGD(parameters))
        return steppers[0]

    blocks, how = moe_blocks(task.inputs.shape[-1], **options), {"tied": ties_of(name), "masks": Masks(seed)}
    loss: Any = cross_entropy_plainly
    found = training.train_alone(
        blocks, loss, optimizer, task.batches, microbatches=microbatches, dtype=dtype, clip=CLIP, **how
    )
    model, places = build_model(blocks, 0, dtype), iter(steppers[0].noted)
    training.tie(model, ties_of(name))
    noted = {id(parameter): next(places)[1] for parameter in model.parameters()}
    gradients = {name: noted[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    return Trained(found.losses, found.norms, gradients, found.weights)
