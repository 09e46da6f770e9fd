"""`tune`: the best strategies for a model, a cluster and a batch.

tuning = tune(model, hardware, gpus=1024, batch=1536, seq=2048, fixed={"tp": 8}, top=5)
tuning.best[0].strategy        the fastest that fits; tuning.misfit says why, where nothing does
tuning.certificate()           what was left out, each box with the bound that says why
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quintsched.arguments import MAPPING, WHOLE, ours, takes
from quintsched.errors import UsageError
from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.placement import check
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.tuning.bounds import relaxed
from quintsched.strategies.tuning.choices import Choices
from quintsched.strategies.tuning.evaluator import Evaluator
from quintsched.strategies.tuning.ranking import Candidates
from quintsched.strategies.tuning.search import Found, Progress, Search, strategy_at
from quintsched.strategies.tuning.space import FULL, Space, make_space


@dataclass(frozen=True)
class Candidate:
    """A strategy that fits, and what the search found of it; `prediction.step.predict` has the breakdown."""

    strategy: Strategy
    step_s: float
    memory_bytes: float
    """Of the fullest rank."""


@dataclass(frozen=True, eq=False)
class Tuning:
    """What a search found."""

    space: Space
    hardware: Hardware
    best: tuple[Candidate, ...]
    """The k fastest that fit, by rising time; ties by memory, then by the order of the space. Of strategies that differ
    in the numbers of layers that stages recompute alone, only the best."""
    front: tuple[Candidate, ...]
    """Faster than all that hold as little, by rising time: of strategies whose stages all recompute alike, and those of
    `best`. () where it was not asked for."""
    strategies: int
    """How many the space holds."""
    seconds: float
    found: Found

    @property
    def model(self) -> Model:
        """What is trained."""
        return self.space.model

    @property
    def evaluated(self) -> int:
        """How many strategies were evaluated."""
        return self.found.rows + self.found.worked_out


@takes(
    "tune(find_model('gpt3-175b'), find_hardware('a100-80gb'), gpus=1024, batch=1536)",
    model=ours("Model"),
    hardware=ours("Hardware"),
    gpus=WHOLE,
    batch=WHOLE,
    seq=WHOLE,
    fixed=MAPPING,
)
def tune(
    model: Model,
    hardware: Hardware,
    gpus: int,
    batch: int,
    seq: int | None = None,
    *,
    fixed: Mapping[str, Any] | None = None,
    top: int = 10,
    front: bool = True,
    prune: bool = True,
    progress: Progress | None = None,
) -> Tuning:
    """Search all placeable strategies of `model` on `gpus` GPUs for the `top` fastest that fit.

    Args:
        model: what is trained.
        hardware: a GPU, and how many of them make a node.
        gpus: how many there are; every strategy uses all of them.
        batch: samples of a step, over all replicas.
        seq: tokens of a sample; None: the model's longest.
        fixed: the fields of `Choices`: a value, or several to choose among, of each axis that is not free.
        top: how many are ranked.
        front: whether the Pareto front of time and memory is found too.
        prune: whether boxes that cannot win are left out; the result is the same.
        progress: called with frames done, frames in all, and the best time so far in seconds (inf: none yet).

    Raises UsageError for sizes and choices under which nothing can be placed.
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise UsageError(f"tune: top is {top!r}; give a whole number from 1")
    began = time.perf_counter()
    space = make_space(model, gpus, batch, model.seq if seq is None else seq, Choices.read(fixed))
    for dtype in range(len(space.choices.dtype)):
        check(model, hardware, space.strategy(relaxed(space, np.zeros(1, np.int64), dtype, 0, 0, FULL), 0))
    search = Search(space, Evaluator(space, hardware), top=top, front=front, prune=prune, progress=progress)
    found = search.run()
    return Tuning(
        space=space,
        hardware=hardware,
        best=_candidates(space, found.ranking.best),
        front=_candidates(space, found.ranking.front),
        strategies=space.count(),
        seconds=time.perf_counter() - began,
        found=found,
    )


def _candidates(space: Space, found: Candidates) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(strategy_at(space, found, row), float(found.time_s[row]), float(found.memory_bytes[row]))
        for row in range(len(found))
    )
