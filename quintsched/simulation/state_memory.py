"""What a rank holds for good: weights, gradients and the optimizer's state, shared out over replicas or not.

With R replicas, and a rank's weights W, gradients G and optimizer state O in memory, the peaks are (Rajbhandari et al.
2020, "ZeRO", arXiv:1910.02054, section 5; theirs leaves out what stands for a while)

    ZeRO   weights                     gradients                    optimizer
    0      W                           G                            O
    1      W                           G                            O/R
    2      W                           G/R + g                      O/R
    3      W/R + w                     G/R + g                      O/R

    g    the most full gradients that stand at once: a stage's, from a backward to its next reduce-scatter, at which
         they stand beside the share that is kept of them (from the first one on)
    w    the most full weights that stand at once: a stage's, from `GatherParams` to `FreeParams`, beside the shares

Gradients come to stand in the first backward and go with the optimizer's step; with ZeRO-1 a rank's share of their sum
takes no room of its own. Experts' weights (`Costs.experts`) are shared out over dp x cp only: R is smaller for them.
Everything is counted in program order, as the activations are; within an instruction, what it makes stands beside
what it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from quintsched.ir import instructions as ins
from quintsched.ir.columns import Amounts
from quintsched.ir.plan_data import PlanData
from quintsched.simulation.activation_memory import activation_changes, while_running
from quintsched.simulation.costs import Costs


def peak_state(plan: PlanData, costs: Costs) -> tuple[float, ...]:
    """Return the most that each pp rank holds of weights, gradients and optimizer state, in the activations' unit."""
    state = _State(plan, costs)
    return tuple(
        float(state.while_running(rank).max(initial=state.always(rank))) for rank in range(plan.columns.num_ranks)
    )


def peak_memory(plan: PlanData, costs: Costs) -> tuple[float, ...]:
    """Return the most that each pp rank holds of these and of activations together."""
    state = _State(plan, costs)
    net, most = (amounts / plan.schedule.parts for amounts in activation_changes(plan, costs))
    peaks = []
    for rank in range(plan.columns.num_ranks):
        running = state.while_running(rank) + while_running(plan.columns, rank, net, most)
        peaks.append(float(running.max(initial=state.always(rank))))
    return tuple(peaks)


def bucket_share(plan: PlanData, costs: Costs, stage: int, bucket: int) -> float:
    """Return which share of a stage's weights a bucket holds: the dense ones in equal parts, or all experts'."""
    dense, experts = plan.buckets_per_stage, _experts(plan, costs, stage)
    return experts if bucket == dense else (1 - experts) / dense


def _experts(plan: PlanData, costs: Costs, stage: int) -> float:
    """Return the share of experts; 0 where every rank holds all of them, so that they are weights like others."""
    return costs.experts_of(stage) if plan.mesh.axis_size("ep") > 1 else 0.0


@dataclass(frozen=True)
class _State:
    """The state of every rank of a plan under some costs."""

    plan: PlanData
    costs: Costs

    def always(self, rank: int) -> float:
        """What a rank holds before the step begins: its weights and the optimizer's state, or its shares of them."""
        zero = self.plan.zero
        return sum(
            self._of("weights", stage) * (self._kept(stage) if zero.shards_weights else 1.0)
            + self._of("optimizer_state", stage) * (self._kept(stage) if zero.shards_optimizer else 1.0)
            for stage in self.plan.layout.stages_of(rank)
        )

    def while_running(self, rank: int) -> Amounts:
        """What a rank holds while each of its instructions runs."""
        made, taken = np.zeros((2, len(self.plan.programs[rank])))
        for index, amount in self._changes(rank):
            (made if amount > 0 else taken)[index] += amount
        held: Amounts = self.always(rank) + np.cumsum(made)
        held[1:] += np.cumsum(taken)[:-1]
        return held

    def _changes(self, rank: int) -> Iterator[tuple[int, float]]:
        """Yield (index, change): full weights, full gradients of a bucket and shares of these as they come and go."""
        zero, full, shares = self.plan.zero, dict[tuple[int, int], float](), dict[tuple[int, int], float]()
        for index, i in enumerate(self.plan.programs[rank]):
            if isinstance(i, ins.GatherParams | ins.FreeParams):
                yield index, self._of("weights", i.stage) * (1 if isinstance(i, ins.GatherParams) else -1)
            elif i.computes:
                for stage in (side.stage for side in i.sides if isinstance(side, ins.Compute) and side.ends_backward):
                    for bucket, amount in self._gradients[stage].items():
                        if (stage, bucket) not in full:
                            full[stage, bucket] = amount
                            yield index, amount
            elif isinstance(i, ins.ReduceScatterBucket) and zero.shards_gradients:
                place = (i.stage, i.bucket)
                if place not in shares:
                    shares[place] = self._gradients[i.stage][i.bucket] / self._replicas(i.bucket)
                    yield index, shares[place]
                yield index, -full.pop(place, 0.0)
            elif isinstance(i, ins.OptStep):
                gone = [(held, place) for held in (full, shares) for place in held if place[0] in i.stages]
                yield from ((index, -held.pop(place)) for held, place in gone)

    @cached_property
    def _gradients(self) -> Mapping[int, Mapping[int, float]]:
        """What each bucket of each stage's gradients holds; experts' are one even where they have no replicas."""
        numbers = range(self.plan.buckets_per_stage + 1)
        return {
            stage: {b: self._of("gradients", stage) * bucket_share(self.plan, self.costs, stage, b) for b in numbers}
            for stage in range(len(self.plan.stage_to_pp))
        }

    def _kept(self, stage: int) -> float:
        """Which share of a stage a rank keeps where it is shared out."""
        experts, dense = _experts(self.plan, self.costs, stage), self.plan.buckets_per_stage
        return (1 - experts) / self._replicas(0) + experts / self._replicas(dense)

    def _replicas(self, bucket: int) -> int:
        """How many ranks share out a bucket."""
        return prod(map(self.plan.mesh.axis_size, self.plan.layout.buckets.get(bucket, ())))

    def _of(self, name: str, stage: int) -> float:
        spec = self.plan.schedule
        return self.costs.of_stage(name, stage, spec.chunks, spec.slices) / spec.parts
