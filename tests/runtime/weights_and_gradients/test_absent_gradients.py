"""Parameters that no microbatch uses are not stepped, as in one process; zeros that came are a gradient."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quintsched as qs
from quintsched.runtime import Engine, MoE, Transport, run_local
from quintsched.runtime.weights_and_gradients import grad_buckets

from ...helpers.training import (
    Outcome,
    call_with_share,
    require_equal,
    require_same_bits,
    squares,
    train_alone,
    train_ranks,
)
from ..optim.optimizers import plain

WIDTH = 8


class Choosing(nn.Module):
    """Has three branches: one per sign of the first sample's first feature, and one that nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        self.positive, self.negative, self.unused = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.gate = nn.Parameter(torch.zeros(WIDTH))
        self.last = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, choose: Tensor) -> Tensor:
        if x.is_meta:
            return self.positive(x)
        branch = self.positive if choose[0] > 0 else self.negative
        return x + torch.tanh(branch(x)) + self.gate * 0 + (self.last * 0.0 if choose[0] < 0 else 0)


def batches() -> list[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    random = torch.Generator().manual_seed(0)
    found = []
    for signs in ([1, 1, 1, 1], [-1, -1, -1, -1], [1, 1, 1, -1], [1, 1, 1, 1]):
        inputs, targets = torch.randn(2, 8, WIDTH, generator=random, dtype=torch.float64).unbind()
        found.append((inputs, targets, {"choose": torch.tensor(signs, dtype=torch.float64).repeat_interleave(2)}))
    return found


OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.3),
    "sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.1),
    "adafactor": partial(torch.optim.Adafactor, lr=0.01, weight_decay=0.3, eps=(1e-6, 1e-3)),
    "several": lambda parameters: [
        torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.01, weight_decay=0.3),
        torch.optim.AdamW([p for p in parameters if p.dim() != 2], lr=0.01, weight_decay=0.3),
    ],
}


TIED = ("0.shared.weight", "1.shared.weight")


def alone(optimizer: str, given: Sequence[Callable[[], nn.Module]], tied: Mapping[str, Sequence[str]]) -> Outcome:
    """Train in one process, gradients set to none between steps."""
    return train_alone(given, squares, plain(OPTIMIZERS[optimizer]), batches(), microbatches=4, tied=tied)


def train(plan: qs.Plan, optimizer: str, given: Sequence[Callable[[], nn.Module]], **more: Any) -> list[Outcome]:
    how: dict[str, Any] = {"dtype": torch.float64, "bucket_mb": 0.0005, **more}
    return train_ranks(plan, given, squares, OPTIMIZERS[optimizer], batches(), **how)


SCHEDULES = [s.name for s in qs.all_schedules() if s.mode == "train" and s.max_slices == 1]


@pytest.mark.sampled(56)
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_on_every_schedule_recomputed_and_accumulated_too(schedule: str, zero: int) -> None:
    recompute, parts = zero % 2, 2 - zero // 2
    microbatches = 4 if schedule == "dualpipe" else 2
    plan = qs.compile(schedule, mesh="dp=2,pp=2", microbatches=microbatches, zero=zero, recompute=recompute)
    given = [Choosing] * len(plan.stage_to_pp)
    require_equal(train(plan, "adamw", given, parts=parts), alone("adamw", given, {}))


class Pair(Choosing):
    """Its branches are such as tp cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.other_up, self.other_down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor, choose: Tensor) -> Tensor:
        if x.is_meta or choose[0] > 0:
            return x + self.down(torch.tanh(self.up(x)))
        return x + self.other_down(torch.tanh(self.other_up(x)))


class RoutedMixture(nn.Module):
    """Has an expert that no token takes."""

    def __init__(self) -> None:
        super().__init__()
        make = partial(nn.Linear, WIDTH, WIDTH)
        self.mixture = MoE(WIDTH, 4, make, top_k=1, balance=0.0, z=0.0)
        with torch.no_grad():
            self.mixture.router.weight[3] = -10.0

    def forward(self, x: Tensor, choose: Tensor) -> Any:
        return x + self.mixture(x.abs())[0]


class Lookup(nn.Module):
    """Has a weight that two stages hold, and uses it for samples with a negative sign, or never."""

    def __init__(self, *, idles: bool = False) -> None:
        super().__init__()
        self.shared, self.own = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.idles = idles

    def forward(self, x: Tensor, choose: Tensor) -> Tensor:
        return self.own(x) if self.idles or x.is_meta or choose[0] > 0 else self.shared(x)


IdleLookup = partial(Lookup, idles=True)


OVERLAPPED = {"schedule": "dualpipe", "microbatches": 4, "overlap": True}
KINDS: dict[str, tuple[list[Callable[[], nn.Module]], str, str, dict[str, Any]]] = {
    "a pipeline": ([Choosing, Choosing], "sgd", "dp=2,pp=2", {}),
    "replicas": ([Choosing, Choosing], "adafactor", "dp=4", {"microbatches": 1}),
    "tp": ([Pair, Pair], "adamw", "dp=2,tp=2", {}),
    "matrices gathered over tp": ([Pair, Pair], "several", "dp=2,tp=2", {}),
    "several optimizers": ([Choosing, Pair], "several", "dp=2,pp=2", {}),
    "experts over ep": ([RoutedMixture, Pair], "adamw", "dp=2,ep=2", {}),
    "tied": ([Lookup, Lookup], "adamw", "dp=2,pp=2", {"tied": {"shared": (0, 1)}}),
    "tied, in use on one stage": ([Lookup, IdleLookup], "adamw", "dp=2,pp=2", {"tied": {"shared": (0, 1)}}),
    "tied, in use on none": ([IdleLookup, IdleLookup], "adamw", "dp=2,pp=2", {"tied": {"shared": (0, 1)}}),
    "sums in messages": ([Choosing, Choosing], "adamw", "dp=2,pp=2", {"communication": "ring"}),
    "overlapped": ([Choosing, Choosing], "adamw", "dp=2,pp=2", OVERLAPPED),
}


@pytest.mark.sampled(40)
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_on_every_mesh(kind: str, zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit alike whether a step begins with zeros, or with a copy of its first gradient."""
    given, optimizer, mesh, options = KINDS[kind]
    plan = qs.compile(**{"schedule": "1f1b", "mesh": mesh, "microbatches": 2, "zero": zero, **options})
    tied = {"shared": TIED} if plan.tied else {}
    found = train(plan, optimizer, given, tied=tied)
    require_equal(found, alone(optimizer, given, tied))
    monkeypatch.setattr(grad_buckets, "IN_CACHE", 0)
    require_same_bits(found, train(plan, optimizer, given, tied=tied))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_of_short_weights_are_not_stepped_either(dtype: torch.dtype) -> None:
    plan = qs.compile("1f1b", mesh="dp=2", microbatches=2, zero=1)

    def run(transport: Transport) -> None:
        engine = Engine(plan, [Choosing] * 2, squares, OPTIMIZERS["adamw"], dtype=dtype, transport=transport)
        before = {name: weight.clone() for name, weight in engine.full_weights().items()}
        call_with_share(engine, engine.step, pytree.tree_map(lambda x: x.to(dtype), batches()[0]))
        for name, weight in engine.full_weights().items():
            assert torch.equal(weight, before[name]) is not ("positive" in name), name

    run_local(2, run, timeout_s=60)
