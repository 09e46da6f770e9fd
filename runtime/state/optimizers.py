"""The optimizers of one rank: one per optimizer step of the plan, over the weights of its stages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from ..stage.build import Stage
from .master_weights import Masters

OptimizerFn = Callable[[Any], Optimizer]
"""Parameters → optimizer; where its parameter's name begins with "named", it is given (name, parameter) pairs."""


def build_optimizers(
    build: OptimizerFn, steps: Iterable[tuple[int, ...]], stages: Mapping[int, Stage], masters: Masters
) -> dict[tuple[int, ...], Optimizer]:
    """Build an optimizer for each of the `steps`, stages that step together; none for those without trained weights."""
    wants_names = next(iter(inspect.signature(build).parameters), "").startswith("named")
    made = {}
    for step in steps:
        weights = (named for stage in step for named in stages[stage].named_weights().items())
        masters_of = ((name, masters.of(parameter)) for name, parameter in weights)
        named = [(name, master) for name, master in masters_of if master is not None]
        if named:
            made[step] = build(named if wants_names else [parameter for _, parameter in named])
    return made
