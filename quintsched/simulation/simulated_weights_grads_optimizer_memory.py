"""Peak memory for weights, gradients and optimizer state of each rank, sharded over replicas or not.

With R replicas, and a rank's weights W, gradients G and optimizer state O in memory, the peaks are (Rajbhandari et al.
2020, "ZeRO", arXiv:1910.02054, section 5; without the temporary parts g and w)

    ZeRO   weights                     gradients                    optimizer
    0      W                           G                            O
    1      W                           G                            O/R
    2      W                           G/R + g                      O/R
    3      W/R + w                     G/R + g                      O/R

    g    the peak of full gradients: a stage's, from a backward to its next reduce-scatter, during which they are
         resident beside the shard that is kept (from the first one on)
    w    the peak of full weights: a stage's, from `GatherParams` to `FreeParams`, beside the shards

Gradients are allocated in the first backward and freed by the optimizer's step; with ZeRO-1 a rank's shard of their
sum needs no extra memory. Experts' weights (`Costs.experts`) are sharded over dp x cp only: R is smaller for them. All
is counted in program order, like activations; during an instruction, values that it produces are resident beside
those that it consumes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from quintsched.ir import instruction_set as ins
from quintsched.ir.instruction_columns import Amounts
from quintsched.ir.plan_data import PlanData
from quintsched.simulation.costs import Costs
from quintsched.simulation.simulated_activation_memory import activation_changes, while_running


def peak_state(plan: PlanData, costs: Costs) -> tuple[float, ...]:
    """Return each pp rank's peak of weights, gradients and optimizer state, in the activations' unit."""
    state = _State(plan, costs)
    return tuple(
        float(state.while_running(rank).max(initial=state.always(rank))) for rank in range(plan.columns.num_ranks)
    )


def peak_memory(plan: PlanData, costs: Costs) -> tuple[float, ...]:
    """Return each pp rank's peak of these and of activations together."""
    state = _State(plan, costs)
    net, most = (amounts / plan.schedule.parts for amounts in activation_changes(plan, costs))
    peaks = []
    for rank in range(plan.columns.num_ranks):
        running = state.while_running(rank) + while_running(plan.columns, rank, net, most)
        peaks.append(float(running.max(initial=state.always(rank))))
    return tuple(peaks)


def bucket_share(plan: PlanData, costs: Costs, stage: int, bucket: int) -> float:
    """Return the fraction of a stage's weights in a bucket: an equal part of the dense ones, or all experts'."""
    dense, experts = plan.buckets_per_stage, _experts(plan, costs, stage)
    return experts if bucket == dense else (1 - experts) / dense


def _experts(plan: PlanData, costs: Costs, stage: int) -> float:
    """Return the fraction of experts; 0 if every rank holds all experts, as their weights are then like others."""
    return costs.experts_of(stage) if plan.mesh.axis_size("ep") > 1 else 0.0


@dataclass(frozen=True)
class _State:
    """State of all ranks of a plan under some costs."""

    plan: PlanData
    costs: Costs

    def always(self, rank: int) -> float:
        """Memory of a rank before the step: its weights and the optimizer's state, or its shards of them."""
        zero = self.plan.zero
        return sum(
            self._of("weights", stage) * (self._kept(stage) if zero.shards_weights else 1.0)
            + self._of("optimizer_state", stage) * (self._kept(stage) if zero.shards_optimizer else 1.0)
            for stage in self.plan.layout.stages_of(rank)
        )

    def while_running(self, rank: int) -> Amounts:
        """Memory of a rank while each of its instructions runs."""
        made, taken = np.zeros((2, len(self.plan.programs[rank])))
        for index, amount in self._changes(rank):
            (made if amount > 0 else taken)[index] += amount
        held: Amounts = self.always(rank) + np.cumsum(made)
        held[1:] += np.cumsum(taken)[:-1]
        return held

    def _changes(self, rank: int) -> Iterator[tuple[int, float]]:
        """Yield (index, change) when full weights, full gradients of a bucket, or shards are allocated or freed."""
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
        """Size of each gradient bucket per stage; experts count as one bucket even if they have no replicas."""
        numbers = range(self.plan.buckets_per_stage + 1)
        return {
            stage: {b: self._of("gradients", stage) * bucket_share(self.plan, self.costs, stage, b) for b in numbers}
            for stage in range(len(self.plan.stage_to_pp))
        }

    def _kept(self, stage: int) -> float:
        """Fraction of a stage's state that a rank keeps if it is sharded."""
        experts, dense = _experts(self.plan, self.costs, stage), self.plan.buckets_per_stage
        return (1 - experts) / self._replicas(0) + experts / self._replicas(dense)

    def _replicas(self, bucket: int) -> int:
        """Number of ranks that shard a bucket."""
        return prod(map(self.plan.mesh.axis_size, self.plan.layout.buckets.get(bucket, ())))

    def _of(self, name: str, stage: int) -> float:
        spec = self.plan.schedule
        return self.costs.of_stage(name, stage, spec.chunks, spec.slices) / spec.parts
