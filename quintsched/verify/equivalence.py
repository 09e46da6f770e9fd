"""Algebraic equivalence: a plan must compute exactly the gradient of the sequential program.

Each piece of the model is five random numbers modulo a prime, and computes on each slice of a microbatch

    y = w·x + b + v·k        k' = q·k + u·x        k: the state passed from the previous slice, 0 for the first

with gradients derived by hand. The sequential program visits the pieces in the model's order, the plan visits stages
along its routes. These maps do not commute, so an output depends on every stage that it passed, and their order, and a
sum of gradients on every microbatch in it. Each number has one entry per replica, with separate data, so that a sum
over replicas that is missing, early, duplicated or over other axes is detected as well. If replicas shard gradients
(ZeRO), each keeps some entries of a sum, and 0 for all others, until they are gathered.

The plan is executed by `symbolic_run`, with the rules of a transport. Two different polynomials agree at a random
point with a probability of about (number of stages)/2^61.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quintsched.errors import counted
from quintsched.ir.instruction_values import METRICS, NORM
from quintsched.ir.plan_data import PlanData
from quintsched.text.plan_listing import excerpt
from quintsched.verify.algebraic_training_model import AlgebraicModel, Gradient, Sequential
from quintsched.verify.symbolic_collective import broken_promise
from quintsched.verify.symbolic_rank import SymbolicRank
from quintsched.verify.symbolic_run import SymbolicRun
from quintsched.verify.wellformed import malformations


@dataclass(frozen=True)
class Equivalence:
    """Result of the comparison with the sequential program: `faults` as text, `places` as (rank, index)."""

    plan: PlanData
    faults: tuple[str, ...]
    places: tuple[tuple[int, int], ...] = ()

    @property
    def holds(self) -> bool:
        """Whether every stage gets exactly the sequential program's gradient."""
        return not self.faults

    def explain(self) -> str:
        """Return the verdict as text, with an excerpt around the marked places."""
        if self.holds:
            return f"equivalent: {self.plan.title} computes the gradient of the sequential program"
        head = f"not equivalent to the sequential program: {self.plan.title}"
        return "\n".join([head, *self.faults, *excerpt(self.plan, self.places)])


def equivalence(plan: PlanData, seed: int = 0) -> Equivalence:
    """Run a plan and the sequential program on the same random model, and compare all results of the plan.

    A spelled-out collective is run separately (`symbolic_collective`); the plan's run assumes that it is correct.
    """
    malformed = next(iter(malformations(plan)), None)
    if malformed:
        where = () if malformed.rank is None or malformed.index is None else ((malformed.rank, malformed.index),)
        return Equivalence(plan, (malformed.message,), where)
    judged = ((name, broken_promise(mini, seed)) for name, mini in plan.communication.plans.items())
    broken = tuple(f"collective {name!r}: {fault}" for name, fault in judged if fault)
    return Equivalence(plan, broken) if broken else run_and_compare(plan, seed)


def run_and_compare(plan: PlanData, seed: int = 0) -> Equivalence:
    """Judge a well-formed plan; whether its routes visit the model in order is seen from the results."""
    model = AlgebraicModel(plan, seed)
    run = SymbolicRun(plan, model)
    stopped = run.to_the_end()
    if stopped:
        return Equivalence(plan, *stopped)
    return Equivalence(plan, tuple(_differences(run, Sequential(plan, model))))


def _differences(run: SymbolicRun, expected: Sequential) -> Iterator[str]:
    for rank in run.ranks:
        if METRICS in rank.values and not _same([rank.values[METRICS]], [expected.total_loss]):
            yield f"rank {rank.number} ends with another loss than the sequential program's"
        for stage in run.plan.layout.stages_of(rank.number) if run.plan.mode == "train" else ():
            yield from _wrong_shares(rank.shares.get(stage, []), stage, expected)
            yield from _wrong_steps(rank, stage, expected)
        yield from (f"a gradient of stage {stage} is never reduced on rank {rank.number}" for stage, _ in rank.grads)
        yield from (f"{value} is left over on rank {rank.number}" for value in rank.values if value not in _LASTING)
    for (source, target), queue in run.channels.items():
        if queue:
            yield f"channel {source}→{target}: {counted(len(queue), 'message')} are never received"


_LASTING = (METRICS, NORM)


def _wrong_shares(shares: list[tuple[int, Gradient]], stage: int, expected: Sequential) -> Iterator[str]:
    times = Counter(unit for unit, _ in shares)
    for unit in expected.plan.layout.microbatches_of(stage):
        if times[unit] != 1:
            yield f"stage {stage} adds up the gradient of microbatch {unit} {times[unit]} times instead of once"
    for unit, share in shares:
        if not _same(share, expected.share(stage, unit)):
            yield f"stage {stage} computes another gradient for microbatch {unit} than the sequential program"


def _wrong_steps(rank: SymbolicRank, stage: int, expected: Sequential) -> Iterator[str]:
    steps = {bucket: rank.applied.get((stage, bucket), []) for bucket in expected.plan.layout.buckets}
    if not all(steps.values()):
        yield f"stage {stage} never gets its optimizer step"
    if not all(_same(found, expected.step_gradient(stage, bucket)) for bucket in steps for found in steps[bucket]):
        yield f"the optimizer steps stage {stage} with another gradient than the sequential program's"


def _same(found: Any, wanted: Any) -> bool:
    return all(a.tolist() == b.tolist() for a, b in zip(found, wanted, strict=True))
