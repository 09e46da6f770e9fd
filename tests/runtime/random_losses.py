"""Random losses: terms, reductions, masks and weights, each drawn, on unusual batches, and one process beside them.

    seed ─▶ Case ─┬▶ trained by the engine, in process, in microbatches ─▶ losses, an evaluation, a metric, weights
                  └▶ a plain loop over whole batches                    ─▶ the same, or the loss is refused

What is found to be neither a sum nor a mean is refused; a number that differs in silence is what this looks for.

    python -m tests.runtime.random_losses --count 1000 --seed 1000
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.runtime import Engine

from ..helpers import training
from ..helpers.drawn import judge_many

WIDTH, CLASSES, STEPS, TOLERANCE = 6, 5, 5, 1e-8
MESHES = [("pp=2", 2, 0), ("dp=2", 1, 0), ("dp=2,pp=2", 4, 0), ("dp=2", 2, 1), ("pp=1", 4, 0)]
Given = dict[str, Tensor]
Term = Callable[[Given, Given], Tensor]


def of_ids(o: Given, t: Given, **more: Any) -> Tensor:
    """Return the cross-entropy of logits, whose classes come last."""
    return F.cross_entropy(o["logits"].movedim(-1, 1), t["ids"], **more)


EACH: dict[str, Term] = {
    "squares": lambda o, t: (o["p"] - t["y"]).square().sum(-1),
    "cross-entropy": lambda o, t: of_ids(o, t, reduction="none"),
    "norms": lambda o, t: o["p"].norm(dim=-1),
    "hinge": lambda o, t: (o["p"] - t["y"]).sum(-1).relu(),
    "cosine": lambda o, t: 1 - F.cosine_similarity(o["p"], t["y"], dim=-1),
    "scaled": lambda o, t: (o["p"] * o["t"] - t["y"]).square().mean(-1),
    "uncertain": lambda o, t: ((-o["v"]).exp() * (o["p"] - t["y"]).square() + o["v"]).sum(-1),
}
"""A number for each sample, or token."""
REDUCED: dict[str, Callable[[Tensor, Given], Tensor]] = {
    "mean": lambda each, t: each.mean(),
    "sum": lambda each, t: each.sum(),
    "by samples": lambda each, t: each.sum() / len(t["y"]),
    "masked": lambda each, t: (each * t["mask"]).sum() / t["mask"].sum(),
    "masked, clamped": lambda each, t: (each * t["mask"]).sum() / t["mask"].sum().clamp(min=1),
    "of the masked": lambda each, t: each[t["mask"] > 0].mean(),
    "masked mean": lambda each, t: (each * t["mask"]).mean(),
    "root": lambda each, t: each.mean().sqrt(),
    "largest": lambda each, t: each.max(),
    "those above": lambda each, t: each[each > 0.5].mean(),
    "spread": lambda each, t: each.std(),
    "clamped mean": lambda each, t: each.mean().clamp(max=2),
    "times samples": lambda each, t: each.mean() * len(t["y"]),
}
WHOLE: dict[str, Term] = {
    "mse": lambda o, t: F.mse_loss(o["p"], t["y"]),
    "summed mse": lambda o, t: F.mse_loss(o["p"], t["y"], reduction="sum"),
    "ids": of_ids,
    "ids, smoothed": lambda o, t: of_ids(o, t, label_smoothing=0.1),
    "ids, summed": lambda o, t: of_ids(o, t, reduction="sum"),
    "ids, weighed": lambda o, t: of_ids(o, t, weight=WEIGHTS),
    "divergence": lambda o, t: F.kl_div(o["p"].log_softmax(-1), t["y"].softmax(-1), reduction="batchmean"),
}
BESIDE: dict[str, Callable[[Given, Given, Tensor], Tensor]] = {
    "warming up": lambda o, t, base: t["beta"] * base,
    "learnt factor": lambda o, t, base: base * o["s"],
    "penalty": lambda o, t, base: 0.1 * o["v"].square().sum(),
    "learnt number": lambda o, t, base: o["s"] + (o["t"] - 1).square(),
    "warming number": lambda o, t, base: t["beta"] * o["v"].sum(),
    "nothing": lambda o, t, base: 0 * base,
    "detached": lambda o, t, base: 0.3 * base.detach(),
    "another form": lambda o, t, base: torch.where(t["beta"] > 0.2, base, F.mse_loss(o["p"], t["y"])),
}
WEIGHTS = torch.tensor([1, 2, 0.5, 3, 0.1], dtype=torch.float64)


class Heads(nn.Module):
    """Gives numbers, logits, and weights as they are, which belong to no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.logits = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, CLASSES)
        self.s, self.t, self.v = (nn.Parameter(x) for x in (torch.zeros(()), torch.ones(()), torch.zeros(3)))

    def forward(self, x: Tensor) -> Given:
        """Return them all for (…, width)."""
        return {"p": self.p(x), "logits": self.logits(x), "s": self.s, "t": self.t, "v": self.v}


@dataclass(frozen=True)
class Loss:
    """Terms that are added up; with a `count`, of samples or of what a mask leaves, it gives (sum, weight)."""

    terms: Sequence[tuple[str, Term]]
    count: str = ""

    def __call__(self, output: Given, targets: Given) -> Any:
        """Return the loss of some samples."""
        total = sum((term(output, targets) for _, term in self.terms), torch.zeros((), dtype=torch.float64))
        if not self.count:
            return total
        samples = len(targets["y"])
        return total * samples, float(samples) if self.count == "samples" else targets["mask"].sum()

    def __str__(self) -> str:
        return " + ".join(name for name, _ in self.terms) + (f", over {self.count}" if self.count else "")


def draw_base(random: Random) -> tuple[str, Term]:
    """Return a loss of one kind."""
    if random.random() < 0.35:
        return random.choice([*WHOLE.items()])
    (name, each), (how, reduced) = random.choice([*EACH.items()]), random.choice([*REDUCED.items()])
    return f"{how} of {name}", lambda o, t: reduced(each(o, t), t)


def draw_loss(random: Random) -> Loss:
    """Return a loss of one to three terms."""
    terms = [draw_base(random)]
    for _ in range(random.choice((0, 0, 1, 1, 2))):
        name, base = draw_base(random)
        if random.random() < 0.4:
            terms.append((name, base))
            continue
        how, beside = random.choice([*BESIDE.items()])
        terms.append((f"{how}: {name}", lambda o, t, base=base, beside=beside: beside(o, t, base(o, t))))  # type: ignore[misc]
    return Loss(terms, random.choice(("samples", "masked")) if random.random() < 0.15 else "")


@dataclass(frozen=True)
class Case:
    """A loss, a metric, batches and where they are trained."""

    seed: int
    loss: Loss
    metric: tuple[str, Term] | None
    mesh: str
    microbatches: int
    zero: int
    samples: tuple[int, ...]
    tokens: int
    ignored: int
    """From which step on ids may be ignored; the first samples of that step all are, and masked."""
    warm: int
    accumulates: bool

    def batch(self, step: int) -> tuple[Tensor, Given]:
        """Return inputs and targets of a step."""
        random, count = torch.Generator().manual_seed(97 * self.seed + step), self.samples[step]
        rows = (count, self.tokens) if self.tokens else (count,)
        numbers = torch.randn(*rows, WIDTH + 3, generator=random, dtype=torch.float64)
        ids = torch.randint(CLASSES, rows, generator=random)
        mask = (torch.rand(rows, generator=random) > 0.3).double()
        if step >= self.ignored:
            ids[torch.rand(rows, generator=random) < 0.3] = -100
        if step == self.ignored:
            ids[: count // 4 + 1], mask[: count // 4 + 1] = -100, 0
        beta = torch.tensor(max(0.0, 0.3 * (step - self.warm)), dtype=torch.float64)
        return numbers[..., :WIDTH], {"y": numbers[..., WIDTH:], "ids": ids, "mask": mask, "beta": beta}

    @cached_property
    def blocks(self) -> list[nn.Module]:
        """The model, at its start."""
        torch.manual_seed(self.seed)
        return [nn.Linear(WIDTH, WIDTH).double(), Heads().double()]

    def __str__(self) -> str:
        metric = self.metric[0] if self.metric else None
        given = f"mesh={self.mesh} microbatches={self.microbatches} zero={self.zero} samples={self.samples}"
        more = f"tokens={self.tokens} ignored={self.ignored} warm={self.warm} accumulates={self.accumulates}"
        return f"{self.seed}: {self.loss} | metric {metric} | {given} {more}"


def draw(seed: int) -> Case:
    """Return the case of a seed."""
    random = Random(seed)
    where, usual = random.choice(MESHES), random.choice((8, 8, 7, 12))
    loss, metric = draw_loss(random), draw_base(random) if random.random() < 0.4 else None
    samples = (*[usual] * (STEPS - 1), random.choice((usual, 6)), usual)
    tokens, ignored, warm = (random.choice(some) for some in ((0, 0, 4), (0, 1, 2, STEPS), (0, 1, 2)))
    return Case(seed, loss, metric, *where, samples, tokens, ignored, warm, random.random() < 0.25)


sgd = partial(torch.optim.SGD, lr=0.03)


def train_alone(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of a plain loop, that of an evaluation and its metric; and the weights."""
    whole, last = nn.Sequential(*copy.deepcopy(case.blocks)), case.batch(STEPS)
    found = training.train_alone(whole, case.loss, sgd, [case.batch(step) for step in range(STEPS)], evaluated=last)
    metric = 0.0
    if case.metric:
        whole.load_state_dict(found.weights)
        with torch.no_grad():
            metric = float(case.metric[1](whole(last[0]), last[1]))
    return [*found.losses, metric], found.weights


def train_rank(case: Case, engine: Engine) -> tuple[list[float], float, dict[str, Tensor]]:
    """Return what a rank tells of the same; the loss's weight in the evaluation; and the weights that it has."""

    def share(step: int, part: int = 0, parts: int = 1) -> Any:
        return training.cut_tree(training.cut_tree(case.batch(step), engine.replica, engine.num_replicas), part, parts)

    told = []
    for step in range(STEPS):
        if case.accumulates:
            results = [engine.step(*share(step, part, 2), last=part == 1) for part in range(2)]
            told.append(results[1].with_earlier(results[:1]).loss.item())
        else:
            told.append(engine.step(*share(step)).loss.item())
    result = engine.evaluate(*share(STEPS))
    metric = float(result.metrics["metric"]) if case.metric else 0.0
    return [*told, result.loss.item(), metric], float(result.weight), dict(engine.full_weights())


def judge(case: Case) -> tuple[str, str]:
    """Return "equal", "refused", "unequal", or "none" where the plain loop has no numbers; and a word on it."""
    try:
        told, weights = train_alone(case)
    except (RuntimeError, IndexError) as error:
        return "none", str(error)
    if not all(map(math.isfinite, told)):
        return "none", "not finite"
    plan = qs.compile("1f1b", mesh=case.mesh, microbatches=case.microbatches, zero=case.zero)
    metrics, work = {"metric": case.metric[1]} if case.metric else {}, partial(train_rank, case)
    try:
        ranks = training.run_engines(plan, lambda: copy.deepcopy(case.blocks), work, case.loss, sgd, metrics=metrics)
    except qs.QuintschedError as error:
        return "refused", str(error).splitlines()[0]
    found, weight, _ = ranks[0]
    sums = (told[-1] / weight, told[-1] / case.samples[STEPS])  # a metric that is a sum is over the loss's weight
    told[-1] = min((told[-1], *sums), key=lambda value: abs(value - found[-1]))
    worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(found, told, strict=True))
    worst = max([worst, *(training.difference(w, weights[name]) for rank in ranks for name, w in rank[2].items())])
    return "equal" if worst <= TOLERANCE else "unequal", f"{worst:.1e}: {found} beside {told}"


if __name__ == "__main__":
    judge_many(draw, judge, __doc__)
