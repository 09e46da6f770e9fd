"""Entry point: `what_if(load_run(path))` says how much of a recorded step was avoidable, and names the causes.

`in_words` is its report: replay, causes, waits, and the better orders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from time import monotonic

from quintsched.check_call_arguments import shown
from quintsched.compiler import settings_beside_order
from quintsched.errors import UsageError, counted
from quintsched.files.terminal import percent
from quintsched.plan import Plan
from quintsched.recorded_runs.recorded_run import RecordedRun, RecordedStep
from quintsched.simulation.costs import Costs
from quintsched.simulation.simulator import Simulation
from quintsched.solve.order_search import AFTER_INTERRUPT_S, PlacementSearch, search
from quintsched.solve.recompute_offload_or_lend import LENT, OFFLOADED
from quintsched.solve.recorded.better_order import CHECKPOINT, better_order, caps_of, held_by_stages, moved_by
from quintsched.solve.recorded.idle_causes import Cause, IdleCauses, Waits, waits_of
from quintsched.solve.recorded.replay import RecordedProblem
from quintsched.solve.solved_plan import AUTO, EFFORT, SECONDS, Solution, plan_of, solution_of
from quintsched.text.plan_listing import table
from quintsched.trace.measured_costs import sized_loans

SAME = "same"
"""Word for the stages that recompute in the recorded run."""
WHOLE, SPLIT = "whole", "split"
"""Backwards of a better order: as one, or as two halves."""
MOST_NAMED = 3
"""Most ranks that are named on which one rank has waited."""
LEAST_SHARE = 0.0005
"""Shares of a step below this are left out."""
Told = Callable[[PlacementSearch, float], None]


@dataclass(frozen=True)
class WhatIf:
    """Analysis of one recorded step.

    Attributes:
        run, step: the run, and the step that was analysed.
        recording: the step as a problem of the solver.
        memory_cap: most activations of each rank, in microbatches of a whole rank.
        better: best orders that were found, with whole backwards (where the run had these) and with split ones.
    """

    run: RecordedRun
    step: RecordedStep
    recording: RecordedProblem
    memory_cap: tuple[float, ...]
    better: Mapping[str, Solution]

    @cached_property
    def causes(self) -> tuple[Cause, ...]:
        """Causes of the idle time, from the largest on."""
        return IdleCauses(self.recording).causes

    @cached_property
    def work(self) -> float:
        """Time that a rank computes on average."""
        return IdleCauses(self.recording).work

    @cached_property
    def waits(self) -> Waits:
        """On whom each rank has waited."""
        return waits_of(self.recording)

    @property
    def bubble(self) -> float:
        """Fraction of all ranks' time until the makespan in which they do not compute."""
        return 1 - float(self.recording.computing.sum()) / (len(self.step.rows) * self.step.makespan)

    @cached_property
    def replayed(self) -> Mapping[str, float]:
        """Makespans of the recorded order, timed again with more and more of its measured parts."""
        return {
            "computations": self.recording.without_messages,
            "one message time": self.recording.with_one_message_time,
            "all": self.recording.replay(self.recording.parts).makespan,
        }

    @property
    def simulations(self) -> tuple[Simulation, Simulation]:
        """The replay of the recorded order, and the best order with the same kind of backwards, for pictures."""
        best = self.better[self.alike]
        costs = best.certificate.costs
        return self.run.plan.simulate(costs), best.plan.simulate(costs)

    @property
    def alike(self) -> str:
        """Kind of backwards that the run had."""
        return WHOLE if WHOLE in self.better else SPLIT

    def avoidable(self, name: str) -> float:
        """Fraction of the replayed step by which the best order is shorter."""
        return max(0.0, 1 - self.better[name].certificate.value / self.replayed["all"])

    def summary(self) -> dict[str, object]:
        """Return the figures as JSON data."""
        step = self.step.makespan
        return {
            "source": self.run.source,
            "step": self.step.number,
            "steps": len(self.run.steps),
            "unit": "ms",
            "makespan": step,
            "bubble": self.bubble,
            "message": self.recording.message_time,
            "replay": {name: {"makespan": time, "error": time / step - 1} for name, time in self.replayed.items()},
            "work": self.work / step,
            "causes": [{"name": one.name, "share": one.time / step, "where": one.where} for one in self.causes],
            "waits": [{name: time / step for name, time in of_rank.items()} for of_rank in self.waits],
            "memory_cap": [None if math.isinf(cap) else cap for cap in self.memory_cap],
            "better": {name: self._as_json(name) for name in self.better},
        }

    def _as_json(self, name: str) -> dict[str, object]:
        claim = self.better[name].certificate
        more = {"avoidable": self.avoidable(name), "certified_gap": claim.gap}
        return {**self.better[name].summary(), **more}


def what_if(
    run: RecordedRun,
    *,
    step: int | None = None,
    memory_cap: float | None = None,
    recompute: str = SAME,
    effort: int = EFFORT,
    seconds: float = SECONDS,
    seed: int = 0,
    told: Told = lambda attempt, seconds: None,
) -> WhatIf:
    """Analyse a step: its causes of idle time, and the best order under the same costs and in equal memory.

    Args:
        run: the recorded run, as `load_run` returns it.
        step: number of the step; None: the one with the median makespan.
        memory_cap: most activations of a rank, in microbatches of a whole rank; None: on each rank as many as were, and
            of a plan that offloads or lends, on all as many as on the fullest.
        recompute: stages that recompute: the "same", or "auto": others, where that is faster.
        effort, seed: as of `solve`.
        seconds: most seconds of the search.
        told: called with each improvement and the seconds that have passed.

    Raises:
        UsageError: a step that was not recorded, a cap in which one microbatch has no room.
        UnsoundError: a plan that the solver does not search: with overlaps, slices, early recomputation, other routes.
    """
    if not seconds > 0 or effort < 1:
        raise UsageError(f"seconds is {seconds:g} and effort {effort}; give positive numbers")
    if recompute not in (SAME, AUTO):
        raise UsageError(f"recompute is {shown(recompute)}; give {SAME} or {AUTO}")
    chosen = run.find_step(step)
    recording = RecordedProblem.from_step(run.plan, chosen)
    caps = _caps(run.plan, memory_cap)
    kinds = (WHOLE, SPLIT) if recording.has_whole_backwards else (SPLIT,)
    better, each = dict[str, Solution](), seconds / len(kinds)
    for kind in kinds:
        costs = _costs(run, recording, split=kind == SPLIT, chooses=recompute == AUTO)
        how = partial(search, objective="makespan", seed=seed, effort=effort, told=told)
        compiled = partial(plan_of, whole=kind == WHOLE, **settings_beside_order(run.plan))
        ends_s = monotonic() + each
        done, made = better_order(run.plan, costs, caps, how, compiled, ends_s=ends_s, chooses=recompute == AUTO)
        cap = caps if isinstance(caps, float) else None if any(map(math.isinf, caps)) else caps
        better[kind] = solution_of(done, made, "as recorded", costs, cap)
        each = min(each, AFTER_INTERRUPT_S) if done.is_interrupted else each
    return WhatIf(run, chosen, recording, caps if isinstance(caps, tuple) else (caps,) * run.plan.mesh.pp, better)


def _costs(run: RecordedRun, recording: RecordedProblem, *, split: bool, chooses: bool) -> Costs:
    """Return the costs of a step, with those of the run's copies, and of checkpoints where stages recompute."""
    costs, plan = recording.costs(split=split), run.plan
    more = held_by_stages(plan, checkpoints=bool(plan.recompute) or chooses)
    if moved_by(plan) == OFFLOADED:
        more["host_bandwidth"] = 1 / run.copy_ms if run.copy_ms else None
    if moved_by(plan) == LENT:
        more |= sized_loans(run.copy_ms, costs.p2p)
    return costs.model_copy(update=more)


def _caps(plan: Plan, memory_cap: float | None) -> float | tuple[float, ...]:
    """Return the most activations of each rank; of a plan that offloads or lends, the one number for all."""
    if memory_cap is None:
        return caps_of(plan, Costs.model_validate(held_by_stages(plan)))
    if (word := moved_by(plan)) and memory_cap == math.inf:
        raise UsageError(f"memory_cap is infinite, but activations are {word}; give a number of microbatches")
    return float(memory_cap) if word else (float(memory_cap),) * plan.mesh.pp


def in_words(found: WhatIf) -> Iterator[str]:
    """Yield the lines of a report."""
    step = found.step.makespan
    yield f"{found.run.source}: {found.run.plan.title}; step {found.step.number}, of {len(found.run.steps)} recorded"
    yield f"measured {step:.4g} ms, bubble {percent(found.bubble)}"
    alone, with_messages, everything = found.replayed.values()
    yield (
        f"replayed from computations {_signed(alone / step - 1)}, with {found.recording.message_time:.3g} ms for each "
        f"message {_signed(with_messages / step - 1)}, from all parts {_signed(everything / step - 1)}"
    )
    yield ""
    rows = [("work", percent(found.work / step), "computations of a rank on average")]
    rows += [(one.name, percent(one.time / step), one.where) for one in found.causes]
    yield from table(("of the step", "", ""), rows)
    yield ""
    for rank, waited in enumerate(found.waits):
        named = [f"{name} {percent(time / step)}" for name, time in waited.items() if time >= LEAST_SHARE * step]
        more = [f"others {percent(sum([*waited.values()][MOST_NAMED:]) / step)}"] if len(named) > MOST_NAMED else []
        yield f"rank {rank} idle {percent(sum(waited.values()) / step)}: {', '.join([*named[:MOST_NAMED], *more])}"
    yield ""
    most = counted(max(found.memory_cap), "microbatch", "g")
    yield f"best order in the same memory (at most {most} on a rank{_means(found.run.plan)}):"
    for name, best in found.better.items():
        claim = best.certificate
        yield (
            f"{name} backwards {claim.value:.4g} ms: {percent(found.avoidable(name))} of the step was avoidable; "
            f"certified bound {claim.bound:.4g} (rank {claim.rank} by {claim.reason}), gap {percent(claim.gap)}"
        )
        if best.plan.recompute != found.run.plan.recompute:
            stages = [str(stage) for stage, every in enumerate(best.plan.recompute) if every]
            yield f"  stages that recompute: {', '.join(stages) or 'none'}"
        if best.proved is not None and best.proved > claim.bound:
            yield f"  bound proved by CP-SAT {best.proved:.4g}, gap {percent(best.gap)}"
    if len(found.better) > 1:
        yield "split backwards: both halves are taken to be equally long"


def _means(plan: Plan) -> str:
    """Return what a plan does to need less memory."""
    recomputes = f"; checkpoints are taken to hold {CHECKPOINT:g} of the activations" if plan.recompute else ""
    return {OFFLOADED: "; others may be on the host", LENT: "; others may be lent"}.get(moved_by(plan), "") + recomputes


def _signed(share: float) -> str:
    return f"{100 * share:+.2f} %"
