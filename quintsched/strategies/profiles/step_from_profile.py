"""Composition of a whole step from a profile: its time, and the peak memory of each stage.

stages' times ──▶ blocking 1F1B ──▶ the last backward of each stage ──▶ reductions, tied embeddings, optimizer
"""

from __future__ import annotations

from dataclasses import dataclass

from quintsched.strategies.profiles.blocking_1f1b import blocking_1f1b
from quintsched.strategies.profiles.operator_layout import OperatorLayout
from quintsched.strategies.profiles.operator_rates import Rates
from quintsched.strategies.profiles.profile import Profile
from quintsched.strategies.profiles.stage_peak_memory import StageMemory, stage_memory
from quintsched.strategies.profiles.stage_times import StageTime, end_s, exchange, stage_time, tied_s


@dataclass(frozen=True)
class Composed:
    """Step composed from a profile."""

    step_s: float
    pipeline_s: float
    """Seconds until the end of the last backward on any stage."""
    end_s: float
    """Seconds after it: gradient reduction, tied embeddings, the optimizer."""
    stages: tuple[StageTime, ...]
    exchanges_s: tuple[float, ...]
    """Seconds of exchanges between each stage and the next, both directions together."""
    memory: tuple[StageMemory, ...]
    microbatches: int

    @property
    def slowest(self) -> int:
        """Stage with the longest time per microbatch, exchanges included."""
        return max(range(len(self.stages)), key=self._busy_s)

    def breakdown_s(self) -> dict[str, float]:
        """Return the terms of the step's time on the slowest stage; they add up to `step_s`."""
        stage, number = self.stages[self.slowest], self.microbatches
        exchanged = self._exchanged_s(self.slowest) * number
        compute = (stage.forward_s + stage.backward_s) * number
        waits, again, added = (s * number for s in (stage.communication_s, stage.recompute_s, stage.accumulate_s))
        return {
            "compute": compute - waits - again - added,
            "recompute": again,
            "accumulate": added,
            "tp": waits,
            "pp": exchanged,
            "bubble": self.pipeline_s - compute - exchanged,
            "end": self.end_s,
        }

    def _busy_s(self, stage: int) -> float:
        return self.stages[stage].forward_s + self.stages[stage].backward_s + self._exchanged_s(stage)

    def _exchanged_s(self, stage: int) -> float:
        return sum(self.exchanges_s[max(stage - 1, 0) : stage + 1])


def compose(profile: Profile, layout: OperatorLayout) -> Composed:
    """Return the composed step of a layout; raises `MisfitError` for operators or sizes that the profile lacks."""
    rates = Rates(profile)
    stages = [stage_time(rates, layout, stage) for stage in layout.stages]
    between = [exchange(rates, layout, left) for left in range(len(stages) - 1)]
    forwards, backwards = [stage.forward_s for stage in stages], [stage.backward_s for stage in stages]
    finished = blocking_1f1b(forwards, backwards, between, layout.microbatches)
    ends = [end_s(rates, layout, stage, time.weights) for stage, time in zip(layout.stages, stages, strict=True)]
    ends[0] += tied_s(rates, layout)
    step = max(done + end for done, end in zip(finished, ends, strict=True))
    return Composed(
        step_s=step,
        pipeline_s=max(finished),
        end_s=step - max(finished),
        stages=tuple(stages),
        exchanges_s=tuple(one.both_s for one in between),
        memory=tuple(stage_memory(rates, layout, number) for number in range(len(stages))),
        microbatches=layout.microbatches,
    )
