"""Whether a run with a fault was judged right: the rank, the instruction, the message; wrong names count apart."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import quintsched as qs

from .injection import Injection
from .launched import Outcome, job_settings, plan_of_job, run_with

PHASE_NAMES = {"set-up": "setup", "save": "save"}


@dataclass(frozen=True)
class Judged:
    """What was said of a fault: `named` its rank and no other, `placed` with the place; `wrong`: somebody else.

    `silent`: the run ended as if nothing had happened. `told_s` as in the outcome.
    """

    injection: Injection
    named: bool
    placed: bool
    wrong: bool
    silent: bool
    told_s: float | None
    left: int
    code: int | None
    said: str

    @property
    def unknown(self) -> bool:
        """Whether something was seen, and nobody was named."""
        return not (self.named or self.wrong or self.silent)


def judge(plan: qs.Plan, injection: Injection, outcome: Outcome) -> Judged:
    """Compare what was said of a fault with what it was."""
    ranks = outcome.report.ranks if outcome.report is not None else ()
    named = ranks == (injection.rank,)
    return Judged(
        injection,
        named=named,
        placed=named and _is_placed(plan, injection, outcome),
        wrong=any(rank != injection.rank for rank in ranks),
        silent=outcome.code == 0 and outcome.report is None,
        told_s=outcome.told_s,
        left=outcome.left,
        code=outcome.code,
        said=outcome.said,
    )


def _is_placed(plan: qs.Plan, injection: Injection, outcome: Outcome) -> bool:
    """Whether the culprit's instruction, microbatch and peer, or its phase, are those of the fault."""
    assert outcome.report is not None
    (culprit,) = outcome.report.culprits
    if injection.index is None:
        return culprit.phase == PHASE_NAMES[injection.phase]
    expected = plan.program(injection.rank)[injection.index]
    place = culprit.place
    seen = place.index, place.instruction, place.microbatch, place.peer
    microbatch, peer = getattr(expected, "microbatch", None), getattr(expected, "peer", None)
    return seen == (injection.index, str(expected), microbatch, peer)


def judge_all(
    injections: Sequence[Injection], folder: Path, mesh: str, *, at_once: int = 2, **settings: Any
) -> list[Judged]:
    """Run a job of a mesh once with each fault, several at a time, and judge what was said."""
    plan = plan_of_job(mesh, **settings)

    def run(numbered: tuple[int, Injection]) -> Judged:
        number, injection = numbered
        own = folder / str(number)
        judged = judge(plan, injection, run_with(injection, own, job_settings(own, mesh, **settings)))
        rmtree(own, ignore_errors=True)
        return judged

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(run, enumerate(injections)))
