"""Tuning of a run while it trains (`--autotune`): a better plan and cut, measured, and kept only where it is faster.

    plan A: some steps, traced ──▶ search ──▶ plan B: some steps, traced ──▶ the faster of both, to the end
                       save ────────────────▶ load              save ──────▶ load

The state goes from plan to plan in the run's checkpoints, as in any run that is resumed with another plan.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from quintsched.compiler import compile_request
from quintsched.errors import QuintschedError, UnsoundError, UsageError
from quintsched.plan import Plan
from quintsched.request import CompileRequest
from quintsched.schedules.kit.given_order import schedule_of_rows
from quintsched.solve.recorded.better_order import problem_of_plan
from quintsched.solve.recorded.retune_cut_and_order import Rows, retune
from quintsched.trace.measured_trace import Trace

from ..comm import Transport
from ..comm.host_collectives import broadcast_bytes
from ..settings.allowed_setting_values import Start
from ..settings.job_file import JobConfig
from ..train.reporter import reporter_of
from ..train.trainer import Trainer

WARM_UP, TRACED = 2, 8
"""Steps by each plan that are not measured, and that are."""
FOLDER = "-autotune"
"""End of the name of the traces' folder, beside that of the checkpoints."""


@dataclass(frozen=True)
class Proposal:
    """Plan that is to be tried, None: the one before is to stay; and both steps in seconds, the new one predicted."""

    plan: Plan | None
    now_s: float
    predicted_s: float


Propose = Callable[[Plan, Trace, Sequence[int], Sequence[float]], Proposal]


@dataclass(frozen=True)
class Autotune:
    """A run that tunes itself; all ranks have one, and decide alike.

    Args:
        job, transport, overrides: as of `Trainer.of_job`.
        plan: the plan to begin with.
        propose: returns what to try, from the plan, its trace, and the number of blocks of each stage and the blocks'
            times. Rank 0 calls it.
        wants_stop: whether this rank was asked to stop.
    """

    job: JobConfig
    plan: Plan
    transport: Transport
    propose: Propose
    wants_stop: Callable[[], bool] = lambda: False
    overrides: Sequence[str] = ()

    def tune_and_train(self, start: Start, notes: Sequence[str] = ()) -> None:
        """Train to the end; rank 0 reports, `notes` first. Raises `UsageError` where nothing can be tuned."""
        if self.job.checkpoint.folder is None:
            raise UsageError("--autotune hands the state from plan to plan in a folder; set checkpoint.dir to one")
        if self.job.runtime.trace is not None:
            raise UsageError("--autotune writes traces of its own; leave the trace out")
        try:
            problem_of_plan(self.plan)
        except UnsoundError as error:
            raise UsageError(f"--autotune: {error}") from error
        self._say(*notes)
        trainer = self._trainer(self.plan, "before")
        held, blocks = trainer.blocks_of_stages(), trainer.measure_blocks()
        if not self._train(trainer, start):
            return
        del trainer
        found = self._proposal(held, blocks)
        if found.plan is not None and not self._try(found.plan, found):
            return
        if found.plan is None:
            self._say(f"autotune: {_ms(found.now_s)} a step; no plan is predicted to be faster by over 1 %")
            self._train(self._trainer(self.plan), "resume")

    def _try(self, plan: Plan, found: Proposal) -> bool:
        """Train some steps by the new plan, and to the end by the faster one; return whether it came so far."""
        predicted = found.predicted_s / found.now_s - 1
        self._say(f"autotune: {_ms(found.now_s)} a step; trying {plan.title}: predicted {predicted:+.1%}")
        trainer = self._trainer(plan, "after")
        if not self._train(trainer, "resume"):
            return False
        del trainer
        taken_s = float(self._first_says(lambda: str(step_s(self._trace("after", plan)))))
        is_kept = taken_s < found.now_s
        outcome = "kept" if is_kept else "not faster: back to the plan before"
        self._say(f"autotune: measured {_ms(taken_s)} a step, {taken_s / found.now_s - 1:+.1%}: {outcome}")
        self._train(self._trainer(plan if is_kept else self.plan), "resume")
        return True

    def _say(self, *lines: str) -> None:
        reporter = reporter_of(self.job.log.path, self.transport.rank)
        for line in lines:
            reporter.say(line)

    def _trainer(self, plan: Plan, traced: str | None = None) -> Trainer:
        """Return the trainer of a plan; one that is `traced`, by this name, stops after so many steps."""
        job, begun, trainers = self.job, list[int](), list[Trainer]()
        if traced is not None:
            trace = {"trace": str(self._folder(traced)), "trace_first": WARM_UP, "trace_steps": TRACED}
            job = job.model_copy(update={"runtime": job.runtime.model_copy(update=trace)})

        def wants_stop() -> bool:
            if traced is not None and not begun:
                begun.append(trainers[0].progress.step)
            ends = traced is not None and trainers[0].progress.step + 1 >= begun[0] + WARM_UP + TRACED
            return ends or self.wants_stop()

        gc.collect()
        reporter = reporter_of(job.log.path, self.transport.rank)
        trainers.append(
            Trainer.of_job(job, plan, self.transport, reporter, wants_stop=wants_stop, overrides=self.overrides)
        )
        return trainers[0]

    def _train(self, trainer: Trainer, start: Start) -> bool:
        """Train; return whether steps are left, and no rank was asked to stop."""
        steps = trainer.total_steps
        if start == "new" and steps <= 2 * (WARM_UP + TRACED):
            raise UsageError(f"--autotune measures {2 * (WARM_UP + TRACED)} steps; the training has {steps}")
        trainer.fit(start)
        is_over = trainer.progress.stopped or trainer.progress.step >= steps
        return not trainer.engine.everyone.add_numbers(is_over or self.wants_stop())[0]

    def _folder(self, name: str) -> Path:
        return Path(f"{self.job.checkpoint.dir}{FOLDER}", name)

    def _trace(self, name: str, plan: Plan) -> Trace:
        return Trace.load(self._folder(name), plan)

    def _proposal(self, held: Sequence[int], blocks: Sequence[float]) -> Proposal:
        def propose() -> str:
            found = self.propose(self.plan, self._trace("before", self.plan), held, blocks)
            plan = None if found.plan is None else found.plan.to_json()
            return json.dumps([plan, found.now_s, found.predicted_s])

        plan, now_s, predicted_s = json.loads(self._first_says(propose))
        return Proposal(None if plan is None else Plan.from_json(plan), now_s, predicted_s)

    def _first_says(self, say: Callable[[], str]) -> str:
        """Return, on all ranks, what the first one says; its errors are raised on all (collective)."""
        said = ""
        if self.transport.rank == 0:
            try:
                said = f" {say()}"
            except QuintschedError as error:
                said = f"!{error}"
        said = broadcast_bytes(self.transport.world_group(), said.encode(), 0).decode()
        if said.startswith("!"):
            raise UsageError(f"--autotune: {said[1:]}")
        return said[1:]


def proposer(request: CompileRequest) -> Propose:
    """Return a function that searches for a better plan than the one that a request gives."""

    def propose(plan: Plan, trace: Trace, held: Sequence[int], blocks: Sequence[float]) -> Proposal:
        def compiled(stages: tuple[int, ...], rows: Rows | None) -> Plan:
            changed = replace(request, stages=stages)
            if rows is not None:
                schedule = schedule_of_rows(rows, plan.stage_to_pp, plan.mesh.pp, bidirectional=len(plan.routes) > 1)
                changed = replace(
                    changed,
                    schedule=schedule,
                    chunks=schedule.min_chunks,
                    stage_to_pp=None,
                    memory_cap=None,  # these are of schedules that search
                    costs=None if request.offload is None and request.lend is None else request.costs,
                )
            return compile_request(changed)

        now_s, found = step_s(trace), retune(plan, trace.costs("s"), held, blocks, compiled)
        return Proposal(found.plan, now_s, now_s - found.gain)

    return propose


def step_s(trace: Trace) -> float:
    """Return the median over the steps of a trace of the longest that a replica took, in seconds."""
    replicas = [group[0] for group in trace.plan.mesh.groups("pp")]
    return median(max(trace.makespan(step, rank) for rank in replicas) for step in trace.steps)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"
