"""Published recipes beside a search: how much longer they take than the best, and by which term.

    tune --beside deepseek-v3            searches the same model, GPUs, batch and precision, as the recipe says them

Settings that a source leaves open are those of the fastest strategy that fits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from quintsched.errors import UsageError
from quintsched.files.terminal import percent
from quintsched.strategies.descriptions.flag_rows import KEYS, PredictionRow, read_row
from quintsched.strategies.descriptions.presets_and_files import PRESETS
from quintsched.strategies.descriptions.strategy_text import duration
from quintsched.strategies.prediction.strategy_columns import Table
from quintsched.strategies.prediction.vectorized_prediction import evaluate
from quintsched.strategies.tuning.axis_choices import Choices
from quintsched.strategies.tuning.explain_choice import explain
from quintsched.strategies.tuning.recommended_strategy import BAND
from quintsched.strategies.tuning.strategy_space import FIXED
from quintsched.strategies.tuning.tune import Tuning

RECIPES = PRESETS / "recipes.json"
SHARED = ("model", "hardware", "gpus", "batch", "seq")
"""Flags that a recipe and the search beside it have in common, besides settings that a search does not vary."""


@dataclass(frozen=True)
class Recipe:
    """A published strategy: its flags, the settings that its source leaves open, and what it took, if that is said."""

    name: str
    flags: Mapping[str, Any]
    open: Mapping[str, tuple[Any, ...]]
    measured_s: float | None
    source: str

    def choices(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the flags of the search beside it, to which `given` adds; raises `UsageError` where they differ."""
        for name in SHARED:
            if name in given and given[name] != self.flags[name]:
                raise UsageError(
                    f"--{name} {given[name]}, but {self.name} has {self.flags[name]}; leave it out beside that recipe"
                )
        found = {name: self.flags[name] for name in SHARED}
        for name in ("dtype", "gradients", "overlap", *FIXED):
            if name in self.flags:
                found[name] = self.flags[name]
        for name in ("recompute", "zero_every"):
            own = self.open.get(name, (self.flags[name],) if name in self.flags else ())
            found[name] = list(dict.fromkeys((*Choices.model_fields[name].default, *own)))
        return {**found, **given}


def find_recipe(text: str) -> Recipe:
    """Return the recipe whose name begins so, without regard to case and punctuation; raises `UsageError`."""
    wanted = _plain(text)
    found = [recipe for recipe in recipes() if _plain(recipe.name).startswith(wanted)]
    if len(found) != 1:
        names = ", ".join(_plain(recipe.name) for recipe in found or recipes())
        raise UsageError(
            f"--beside: {'several recipes begin' if found else 'no recipe begins'} with {text!r}; there are {names}"
        )
    return found[0]


@cache
def recipes() -> tuple[Recipe, ...]:
    """Return all published recipes."""
    table = json.loads(RECIPES.read_text(encoding="utf-8"))
    return tuple(
        Recipe(
            row["name"],
            {name: row[name] for name in KEYS if name in row},
            {name: tuple(values) for name, values in row.get("open", {}).items()},
            row.get("measured_s"),
            row["source"],
        )
        for row in table["rows"]
    )


def chosen(flags: Mapping[str, Any], choose: Mapping[str, Any]) -> PredictionRow:
    """Return a row of flags with the fastest fitting choice of open settings; "any": all chunks that divide."""
    whole = read_row(flags)
    layers = whole.model.layers // whole.strategy.pp
    any_chunks = [v for v in range(1, layers + 1) if layers % v == 0] if whole.strategy.pp > 1 else [1]
    values = {name: any_chunks if given == "any" else given for name, given in choose.items()}
    options = []
    for combination in product(*values.values()):
        option = whole.strategy.model_copy(update=dict(zip(values, combination, strict=True)))
        size = option.replicas * option.microbatch
        if option.batch % size == 0 and (option.chunks in (None, 1) or option.batch // size % option.pp == 0):
            options.append(option)
    found = evaluate(whole.model, whole.hardware, Table.from_strategies(options), simulate=True)
    best = int(np.where(found.fits, found.step_s, np.inf).argmin())
    return PredictionRow(whole.model, whole.hardware, options[best])


def beside(found: Tuning, recipe: Recipe) -> tuple[str, ...]:
    """Return the recipe's regret, and the terms by which it is slower, as lines."""
    judged = explain(found, chosen(recipe.flags, recipe.open).strategy)
    step_s = judged.prediction.step_s
    lines = [f"published: {recipe.name} ({recipe.source})", *judged.lines]
    if found.best:
        regret = step_s / found.best[0].step_s - 1
        within = "within" if regret <= BAND else "beyond"
        measured = "" if recipe.measured_s is None else f", measured {duration(recipe.measured_s)}"
        lines.append(f"it takes {duration(step_s)}{measured}: {percent(regret)} over the best, {within} the tie band")
    return tuple(lines)


def _plain(text: str) -> str:
    """Return a name in lower case with hyphens: "llama-3-405b-16384-gpus"."""
    return re.sub("[^a-z0-9]+", "-", text.lower().replace(",", "")).strip("-")
