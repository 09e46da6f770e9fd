"""Entry point `tune`: the best strategies for a model, a cluster and a batch.

tuning = tune(model, hardware, gpus=1024, batch=1536, seq=2048, fixed={"tp": 8}, top=5)
tuning.best[0].strategy        the fastest that fits; if nothing fits, `explain.misfit(tuning)` explains it
search_certificate.make_certificate(tuning)    what was left out, each box with the bound that excludes it
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quintsched.check_call_arguments import MAPPING, WHOLE_NUMBER, ours, takes
from quintsched.errors import UsageError, counted
from quintsched.simulation.notebook_html import heading, rows_of
from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.descriptions.strategy_text import duration, gigabytes, strategy_name
from quintsched.strategies.descriptions.strategy_validity import check
from quintsched.strategies.tuning.axis_choices import Choices
from quintsched.strategies.tuning.branch_and_bound import BranchAndBound, SearchProgress, SearchResult, strategy_at
from quintsched.strategies.tuning.evaluator import Evaluator
from quintsched.strategies.tuning.fastest_strategies_so_far import Candidates
from quintsched.strategies.tuning.strategy_bounds import relaxed
from quintsched.strategies.tuning.strategy_space import FULL, Space, make_space

HEADROOM = 0.06
"""Fraction of a GPU's memory that is left free by default."""


@dataclass(frozen=True)
class Candidate:
    """Strategy that fits, with the search's results; `predict_strategy.predict` has the breakdown."""

    strategy: Strategy
    step_s: float
    memory_bytes: float
    """Peak bytes of the rank that holds most."""


@dataclass(frozen=True, eq=False)
class Tuning:
    """Result of a search."""

    space: Space
    hardware: Hardware
    """Hardware with the memory that strategies may take: without the headroom."""
    best: tuple[Candidate, ...]
    """The k fastest that fit, by ascending time; ties by memory, then by the order of the space. Of strategies that
    differ only in numbers of layers for per-stage recomputation, only the best."""
    front: tuple[Candidate, ...]
    """Pareto front, by ascending time: of strategies whose stages all recompute alike, and those of `best`. () if it
    was not requested."""
    strategies: int
    """Number of strategies in the space."""
    seconds: float
    found: SearchResult

    @property
    def model(self) -> Model:
        """Model to train."""
        return self.space.model

    def __repr__(self) -> str:
        best = f"best {self.best[0].step_s:.4g} s" if self.best else "none fits"
        return (
            f"Tuning({self.model.name} on {self.space.gpus} {self.hardware.name}: "
            f"{counted(self.strategies, 'strategy')}, {best})"
        )

    def _repr_html_(self) -> str:
        """Return the fastest strategies as HTML, for notebooks."""
        found = [
            (str(rank), duration(one.step_s), gigabytes(one.memory_bytes), strategy_name(one.strategy))
            for rank, one in enumerate(self.best, start=1)
        ]
        title = heading(
            f"{self.model.name} on {self.space.gpus} {self.hardware.name}: {counted(self.strategies, 'strategy', ',')}"
        )
        return f"<div>{title}{rows_of(('', 'step', 'GB', 'strategy'), found)}</div>"

    @property
    def evaluated(self) -> int:
        """Number of strategies that were evaluated."""
        return self.found.rows + self.found.worked_out


@takes(
    "tune(find_model('gpt3-175b'), find_hardware('a100-80gb'), gpus=1024, batch=1536)",
    model=ours("Model"),
    hardware=ours("Hardware"),
    gpus=WHOLE_NUMBER,
    batch=WHOLE_NUMBER,
    seq=WHOLE_NUMBER,
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
    progress: SearchProgress | None = None,
    headroom: float = HEADROOM,
) -> Tuning:
    """Search all valid strategies of `model` on `gpus` GPUs for the `top` fastest that fit.

    Args:
        model: the model to train.
        hardware: the GPU, and the number of GPUs per node.
        gpus: the number of GPUs; every strategy uses all of them.
        batch: samples of a step, over all replicas.
        seq: tokens of a sample; None: the model's longest.
        fixed: the fields of `Choices`: a value, or several to choose among, for each axis that is not free.
        top: the number of strategies to rank.
        front: whether to find the Pareto front of time and memory too.
        prune: whether to leave out boxes that cannot win; the result is the same.
        progress: called with frames done, frames in all, and the best time so far in seconds (inf: none yet).
        headroom: fraction of a GPU's memory that is left free, for what no prediction knows.

    Raises UsageError for sizes and choices without any valid strategy.
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise UsageError(f"tune: top is {top!r}; give a whole number from 1")
    if not 0 <= headroom < 1:
        raise UsageError(f"tune: headroom is {headroom!r}; give a fraction of the memory, from 0 to less than 1")
    hardware = hardware.model_copy(update={"memory_gb": hardware.memory_gb * (1 - headroom)})
    began = time.perf_counter()
    space = make_space(model, gpus, batch, model.seq if seq is None else seq, Choices.from_values(fixed))
    for dtype in range(len(space.choices.dtype)):
        check(model, hardware, space.strategy(relaxed(space, np.zeros(1, np.int64), dtype, 0, 0, FULL), 0))
    search = BranchAndBound(space, Evaluator(space, hardware), top=top, front=front, prune=prune, progress=progress)
    found = search.search_space()
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
