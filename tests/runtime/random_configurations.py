"""Random configurations: a mesh, a schedule and what a run can have besides, each drawn, and one process beside it.

    seed ─▶ Configuration ─┬▶ trained by the engine, in process, by NCCL's rules or through mailboxes ─▶ weights, losses
                           └▶ a plain loop over whole batches, which knows of no microbatches         ─▶ the same

What cannot be is refused by the compiler or the engine, in a sentence of ours; anything else has to be equal.

    python -m tests.runtime.random_configurations --count 300 --seed 1000
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.errors import QuintschedError
from quintsched.runtime import Engine
from quintsched.runtime.blocks.block_outlines import Blocks
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, MoEGPTOptions, gpt, gpt_tied, moe_gpt
from quintsched.runtime.models.vit import ViTOptions, vit

from ..helpers import training
from ..helpers.training import Outcome, call_with_share, worst_difference

CLASSES, LENGTH, TOLERANCE = 12, 8, 1e-10
SHAPES = {"vit": (1, 8, 8), "own": (6,), "odd": (6,)}
SCHEDULES = [schedule for schedule in qs.all_schedules() if schedule.mode == "train"]
"""Schedules of the package, before other tests register theirs."""
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda weights: torch.optim.Adam(weights, lr=1e-3, eps=1e-4),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-3, eps=1e-4, weight_decay=0.1, amsgrad=True),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=1e-2, initial_accumulator_value=0.1),
}


class Residual(nn.Module):
    """A block of a user's own, with a pair of layers that tensor parallelism may cut."""

    def __init__(self, width: int, *, is_odd: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(width)) if is_odd else None

    def forward(self, x: Tensor) -> Tensor:
        """Add what the pair makes of the input, (…, width)."""
        grown = self.down(F.gelu(self.up(self.norm(x))))
        return x + (grown if self.scale is None else grown * self.scale.tanh() + x.mean(-1, keepdim=True).sin())


def ce_sum(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of the targets that count, and their number."""
    total = F.cross_entropy(output.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


def ce_mean(output: Tensor, targets: Tensor) -> Tensor:
    """Return it as a mean, whose weight the engine has to find."""
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class Configuration:
    """One draw; what it says beyond the compiler's and the engine's arguments is in `task`."""

    seed: int
    compiled: dict[str, Any]
    engine: dict[str, Any]
    model: str
    depth: int
    optimizer: str
    loss: Callable[[Tensor, Tensor], Any]
    batches: tuple[int, ...]
    """Samples of each replica in each step."""
    accumulates: bool
    rules: str

    def __str__(self) -> str:
        plan = " ".join(f"{name}={value}" for name, value in self.compiled.items())
        run = " ".join(f"{name}={value}" for name, value in self.engine.items())
        more = f"batches={self.batches}{' accumulated' if self.accumulates else ''} {self.rules}"
        return f"{self.seed}: {plan} | {self.model}*{self.depth} {self.optimizer} {self.loss.__name__} {run} {more}"

    @cached_property
    def plan(self) -> qs.Plan:
        return qs.compile(**self.compiled)

    def compile(self) -> Configuration:
        """Compile its plan; raises what the compiler raises."""
        assert self.plan.programs
        return self

    @property
    def tied(self) -> Mapping[str, Sequence[str]]:
        return gpt_tied(GPTOptions(depth=self.depth, tied=True)) if self.model == "tied" else {}

    def blocks(self) -> Blocks:
        data = DataSpec(input_shape=SHAPES.get(self.model, (LENGTH,)), num_classes=CLASSES)
        if self.model == "vit":
            return vit(data, ViTOptions(hidden=16, depth=self.depth, heads=4))
        if self.model == "moe":
            options = MoEGPTOptions(hidden=16, depth=self.depth, experts=4, mlp_ratio=2, balance=0.0, z=0.0)
            return moe_gpt(data, options)
        if self.model in ("gpt", "tied"):
            return gpt(data, GPTOptions(hidden=16, depth=self.depth, heads=4, tied=self.model == "tied"))
        is_odd = self.model == "odd"
        layers: list[Callable[[], nn.Module]] = [lambda: Residual(16, is_odd=is_odd) for _ in range(self.depth)]
        return [lambda: nn.Linear(6, 16), *layers, lambda: nn.Linear(16, CLASSES)]

    def data(self) -> list[tuple[Tensor, Tensor]]:
        """Return whole batches, of all replicas; the last one is evaluated."""
        random, mesh = torch.Generator().manual_seed(self.seed), self.plan.mesh
        made = []
        for samples in self.batches:
            count = samples * mesh.axis_size("dp") * mesh.axis_size("ep")
            if self.model in SHAPES:
                inputs = torch.randn(count, *SHAPES[self.model], generator=random, dtype=torch.float64)
                targets = torch.randint(0, CLASSES, (count,), generator=random)
            else:
                ids = torch.randint(0, CLASSES, (count, LENGTH + 1), generator=random)
                inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].clone()
            ignored = torch.rand(targets.shape, generator=random) < 0.3
            ignored.view(count, -1)[:, 0] = False
            made.append((inputs, torch.where(ignored, -100, targets)))
        return made


def draw(seed: int) -> Configuration:
    """Draw until the compiler takes it; the engine may still refuse it."""
    random = Random(seed)
    while True:
        case = _draw(seed, random)
        with suppress(QuintschedError):
            return case.compile()


def _draw(seed: int, random: Random) -> Configuration:
    model = random.choice(["vit", "gpt", "gpt", "tied", "moe", "own", "odd"])
    axes = {"dp": (1, 1, 2, 3), "pp": (1, 2, 2, 3, 4), "tp": (1, 1, 2, 4)}
    axes |= {"cp": (1, 1, 2)} if model in ("gpt", "moe") else {}
    axes |= {"ep": (1, 2)} if model == "moe" else {}
    sizes = {axis: random.choice(choices) for axis, choices in axes.items()}
    while torch.tensor([*sizes.values()]).prod() > 8:
        sizes[random.choice([*sizes])] = 1
    mesh = ",".join(f"{axis}={size}" for axis, size in random.sample([*sizes.items()], len(sizes)))
    schedule = random.choice(SCHEDULES)
    microbatches = random.choice((1, 2, 3, 4, 5, 6, 8))
    if schedule.name == "dualpipe" or random.random() < 0.5:
        microbatches = 2 * sizes["pp"] * random.choice((1, 2))
    compiled: dict[str, Any] = {"schedule": schedule.name, "mesh": mesh, "microbatches": microbatches}
    if schedule.name in ("bfs", "interleaved-1f1b", "interleaved-zb"):
        compiled["chunks"] = random.choice((2, 2, 3))
    stages = sizes["pp"] * (
        compiled.get("chunks") or (2 if schedule.name.startswith(("zbv", "v-", "dualpipe-v")) else 1)
    )
    if schedule.name == "seq-1f1b" and model in ("gpt", "tied") and sizes.get("cp", 1) == 1:
        compiled["slices"] = random.choice((2, 4))
    optional: dict[str, Any] = {
        "buckets_per_stage": random.choice((2, 3)),
        "recompute": 1,
        "offload": random.choice((1, 2, 3)),
    }
    if sizes["dp"] * sizes.get("ep", 1) > 1:
        optional |= {"zero": random.choice((1, 2, 3)), "communication": random.choice(("ring", "tree"))}
    compiled |= {name: value for name, value in optional.items() if random.random() < 0.3}
    if schedule.name in ("dualpipe", "dualpipe-v", "interleaved-1f1b") and random.random() < 0.5:
        compiled["overlap"] = True
    if model == "tied" and stages > 1:
        compiled["tied"] = {"embedding": (0, stages - 1)}
    engine: dict[str, Any] = {"bucket_mb": random.choice((0.002, 25.0)), "seed": random.randrange(9)}
    engine |= {"clip": 0.3} if random.random() < 0.5 else {}
    engine |= {"sequence_parallel": True} if sizes["tp"] > 1 and model not in SHAPES and random.random() < 0.5 else {}
    engine |= {"context": random.choice(("ring", "gather", "ulysses"))} if sizes.get("cp", 1) > 1 else {}
    whole = microbatches * random.choice((1, 2))
    uneven = random.random() < 0.4
    batches = tuple(whole + (random.randrange(4) if uneven else 0) for _ in range(4))
    return Configuration(
        seed,
        compiled,
        engine,
        model,
        depth=max(stages - 2, 1) + random.randrange(3),
        optimizer=random.choice([*OPTIMIZERS]),
        loss=random.choice((ce_sum, ce_mean)),
        batches=batches,
        accumulates=random.random() < 0.25,
        rules=random.choice(("nccl", "mailbox")),
    )


def train_alone(case: Configuration) -> Outcome:
    """Train in one process on whole batches, which it knows no microbatches of."""
    *steps, last = case.data()
    groups = [tuple(map(torch.cat, zip(*group, strict=True))) for group in in_groups(steps, case.accumulates)]
    how: dict[str, Any] = {"seed": case.engine["seed"], "clip": case.engine.get("clip"), "tied": case.tied}
    found = training.train_alone(case.blocks(), ce_sum, OPTIMIZERS[case.optimizer], groups, evaluated=last, **how)
    return Outcome(found.losses[-1:], found.weights) if case.accumulates else found


def in_groups(steps: Sequence[Any], accumulates: bool) -> list[Sequence[Any]]:
    """Return which batches make one step of the optimizer."""
    return [steps[:2], steps[2:]] if accumulates else [[step] for step in steps]


def train_rank(case: Configuration, transport: Transport) -> Outcome:
    """Train with the engine on one rank."""
    engine = Engine(
        case.plan,
        case.blocks(),
        case.loss,
        OPTIMIZERS[case.optimizer],
        dtype=torch.float64,
        tied=case.tied,
        transport=transport,
        **case.engine,
    )

    losses = []
    *steps, last = case.data()
    for group in in_groups(steps, case.accumulates):
        results = [call_with_share(engine, partial(engine.step, last=step is group[-1]), step) for step in group]
        losses += [] if case.accumulates else [results[-1].loss.item()]
    return Outcome([*losses, call_with_share(engine, engine.evaluate, last).loss.item()], engine.full_weights())


def judge(case: Configuration) -> tuple[str, str]:
    """Return "equal", "refused" or "unequal", and a word on it."""
    try:
        ranks = run_local(case.plan.mesh.size, lambda t: train_rank(case, t), timeout_s=120, rules=case.rules)  # type: ignore[arg-type]
    except QuintschedError as error:
        return "refused", str(error).splitlines()[0]
    worst = worst_difference(ranks, train_alone(case))
    return "equal" if worst <= TOLERANCE else "unequal", f"{worst:.1e}"


def judge_many(draw: Callable[[int], Any], judge: Callable[[Any], tuple[str, str]], says: str | None) -> None:
    """Draw and judge as many cases as the command line says, a verdict and a case each, and end the process.

    It ends with 1 where one is unequal or raises; `says` is what its help tells.
    """
    parser = argparse.ArgumentParser(description=says, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.count):
        case = draw(seed)
        try:
            verdict, words = judge(case)
        except Exception:
            verdict, words = "crashed", traceback.format_exc()
        counts[verdict] += 1
        sys.stdout.write(f"{verdict:8} {words}\n         {case}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{dict(counts)}\n")
    sys.exit(bool(counts["unequal"] or counts["crashed"]))


if __name__ == "__main__":
    judge_many(draw, judge, __doc__)
