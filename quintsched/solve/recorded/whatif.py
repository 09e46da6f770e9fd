"""Entry point: `what_if(load_run(path))` says how much of a recorded step was avoidable, and names the causes.

`in_words` is its report: replay, causes, waits, and the better orders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from quintsched.errors import UsageError, counted
from quintsched.files.terminal import percent
from quintsched.ir.mesh import Mesh
from quintsched.recorded_runs.recorded_run import RecordedRun, RecordedStep
from quintsched.simulation.simulator import Simulation
from quintsched.solve.order_search import AFTER_INTERRUPT_S, Attempt, search
from quintsched.solve.recorded.idle_causes import Cause, IdleCauses, Waits, waits_of
from quintsched.solve.recorded.replay import Recording
from quintsched.solve.search_problem import problem_of
from quintsched.solve.solved_plan import EFFORT, SECONDS, Solution, plan_of, solution_of
from quintsched.text.plan_listing import table

WHOLE, SPLIT = "whole", "split"
"""Backwards of a better order: as one, or as two halves."""
MOST_NAMED = 3
"""Most ranks that are named on which one rank has waited."""
LEAST_SHARE = 0.0005
"""Shares of a step below this are left out."""
Told = Callable[[Attempt, float], None]


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
    recording: Recording
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
            "memory_cap": list(self.memory_cap),
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
    effort: int = EFFORT,
    seconds: float = SECONDS,
    seed: int = 0,
    told: Told = lambda attempt, seconds: None,
) -> WhatIf:
    """Analyse a step: its causes of idle time, and the best order under the same costs and in equal memory.

    Args:
        run: the recorded run, as `load_run` returns it.
        step: number of the step; None: the one with the median makespan.
        memory_cap: most activations of a rank, in microbatches of a whole rank; None: on each rank as many as were.
        effort, seed: as of `solve`.
        seconds: most seconds of the search.
        told: called with each improvement and the seconds that have passed.

    Raises:
        UsageError: a step that was not recorded, a cap in which one microbatch has no room.
    """
    if not seconds > 0 or effort < 1:
        raise UsageError(f"seconds is {seconds:g} and effort {effort}; give positive numbers")
    chosen = run.find_step(step)
    recording = Recording.from_step(run.plan, chosen)
    caps = recording.peaks if memory_cap is None else (float(memory_cap),) * len(recording.peaks)
    kinds = (WHOLE, SPLIT) if recording.has_whole_backwards else (SPLIT,)
    better, each = dict[str, Solution](), seconds / len(kinds)
    for kind in kinds:
        better[kind], is_interrupted = _best(recording, caps, kind, effort=effort, seconds=each, seed=seed, told=told)
        each = min(each, AFTER_INTERRUPT_S) if is_interrupted else each
    return WhatIf(run, chosen, recording, caps, better)


def _best(
    recording: Recording, caps: tuple[float, ...], kind: str, *, effort: int, seconds: float, seed: int, told: Told
) -> tuple[Solution, bool]:
    """Search from the recorded order on; return the best, and whether Ctrl-C came."""
    plan, costs = recording.plan, recording.costs(split=kind == SPLIT)
    problem = problem_of(plan.mesh.pp, plan.schedule.microbatches, plan.stage_to_pp, costs, caps)
    known = {"the recorded order": recording.orders}
    done = search([(problem, costs)], "makespan", seed=seed, effort=effort, seconds=seconds, told=told, known=known)
    made = plan_of(problem, done.found.orders, Mesh(pp=problem.pp), whole=kind == WHOLE)
    cap = None if any(map(math.isinf, caps)) else caps
    return solution_of(done, made, "as recorded", costs, cap), done.is_interrupted


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
    yield f"best order in the same memory (at most {most} on a rank):"
    for name, best in found.better.items():
        claim = best.certificate
        yield (
            f"{name} backwards {claim.value:.4g} ms: {percent(found.avoidable(name))} of the step was avoidable; "
            f"certified bound {claim.bound:.4g} (rank {claim.rank} by {claim.reason}), gap {percent(claim.gap)}"
        )
        if best.proved is not None and best.proved > claim.bound:
            yield f"  bound proved by CP-SAT {best.proved:.4g}, gap {percent(best.gap)}"
    if len(found.better) > 1:
        yield "split backwards: both halves are taken to be equally long"


def _signed(share: float) -> str:
    return f"{100 * share:+.2f} %"
