"""Interface of the search to the prediction: time and memory of many strategies at once, and parts for bounds.

    time    ≥ pipeline_s                  the rest: end of the step (exchange of gradients, optimizer)
    memory  ≥ maximum of resident_bytes   the rest: temporary terms

A row of a space is a row of the prediction's table, with other codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quintsched.ir.instruction_columns import Ints
from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.prediction.memory.peak_memory import COMES_AND_GOES
from quintsched.strategies.prediction.strategy_columns import Table
from quintsched.strategies.prediction.vectorized_prediction import Evaluated, evaluate, held
from quintsched.strategies.tuning.strategy_space import FIXED, MESH, PER_STAGE, Columns, Space

Floats = NDArray[np.float64]
ENDS = ("dp", "optimizer")
"""Terms of a step's time after the last backward, in a pipeline without ZeRO."""
STATE = ("weights", "gradients", "optimizer")
"""Terms of a rank's memory that ZeRO shards; the other permanent terms do not depend on it."""


@dataclass(frozen=True)
class Evaluator:
    """Prediction for one space on one cluster."""

    space: Space
    hardware: Hardware

    @property
    def capacity_bytes(self) -> float:
        """Memory of a GPU in bytes."""
        return self.hardware.memory_gb * 1e9

    def evaluate(self, columns: Columns, numbers: Ints | None = None) -> Evaluated:
        """Evaluate the rows; "per-stage" counts as "none".

        `numbers` (rows, pp), for rows of one pp: recomputed layers of each rank's stages.
        """
        return evaluate(self.space.model, self.hardware, self.table(columns, numbers))

    def pipeline_s(self, columns: Columns) -> Floats:
        """Return the step time without its end, and without adding up gradients, for rows without ZeRO."""
        found = evaluate(self.space.model, self.hardware, self.table(columns, without_accumulation=True))
        return np.asarray(found.step_s - sum(found.seconds[name] for name in ENDS))

    def resident_bytes(self, columns: Columns) -> dict[str, Floats]:
        """Return weights, gradients, optimizer state and activations of each kind of rank, (rows, kinds) by term.

        Rows that differ in `SWITCHES` only have the same kinds; missing kinds hold 0.
        """
        terms, kinds = held(self.space.model, self.hardware, self.table(columns))
        present = kinds.ranks > 0
        return {name: held * present for name, held in terms.items() if name not in COMES_AND_GOES}

    def rank_bytes(self, columns: Columns) -> Floats:
        """Return the memory of each pipeline rank, (rows, pp), for rows of one pp."""
        terms, _ = held(self.space.model, self.hardware, self.table(columns), each_rank=True)
        return np.asarray(sum(terms.values()))

    def simulate(self, strategies: Sequence[Strategy]) -> Floats:
        """Return the seconds of steps, simulated where the schedule has no closed form."""
        found = evaluate(self.space.model, self.hardware, Table.from_strategies(strategies), simulate=True)
        return np.asarray(found.step_s)

    def table(self, columns: Columns, numbers: Ints | None = None, *, without_accumulation: bool = False) -> Table:
        """Return the rows as the prediction's table, optionally without the time of adding up gradients."""
        rows = len(columns["pp"])
        choices = self.space.choices
        values = {
            "gpus": self.space.gpus,
            "batch": self.space.batch,
            "seq": self.space.seq,
            "gradients": 0,
            "offload": 0,
            "stages": 0,
        }
        values |= {name: int(getattr(choices, name)[0]) for name in FIXED}
        values["fused_accumulation"] |= int(without_accumulation)
        constant = {name: np.full(rows, value, np.int64) for name, value in values.items()}
        recompute, recomputes = self._recomputes(columns, numbers)
        return Table(
            **{name: columns[name] for name in (*MESH, *_SAME)},
            **constant,
            recompute=recompute,
            values={
                "schedule": choices.schedule,
                "dtype": choices.dtype,
                "gradients": choices.gradients,
                "recompute": recomputes,
                "offload": (None,),
                "stages": (None,),
            },
        )

    def _recomputes(self, columns: Columns, numbers: Ints | None) -> tuple[Ints, tuple[Any, ...]]:
        """Return the column of recomputation codes and their values."""
        if numbers is None:
            return columns["recompute"] - min(self.space.names), self._words
        keys = np.column_stack([columns["schedule"], columns["chunks"], numbers])
        distinct, codes = np.unique(keys, axis=0, return_inverse=True)
        schedules = self.space.choices.schedule
        values = [self.space.by_stage(schedules[key[0]], key[1], key[2:]) for key in distinct.tolist()]
        return codes.reshape(-1), tuple(values)

    @cached_property
    def _words(self) -> tuple[Any, ...]:
        """Values of the codes of recomputation, from the lowest upwards."""
        most = max(self.space.model.layers, int(self.space.recomputes.max()))
        words = self.space.names | {PER_STAGE: "none"}
        return tuple(words.get(code, code) for code in range(min(words), most + 1))


_SAME = ("microbatch", "chunks", "schedule", "sequence_parallel", "zero", "zero_every", "overlap", "dtype")
