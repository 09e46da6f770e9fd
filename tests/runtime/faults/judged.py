"""Whether a run with a fault was judged right: the rank, the instruction, the message; wrong names count apart."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

import quintsched as qs

from .injection import Injection
from .launched import Outcome, job_settings, plan_of_job, run_with

PHASE_NAMES = {"set-up": "setup", "save": "save"}

ODD_RANKS = re.compile(r"\(ranks? [\d, and]+ differs? from the others\)")
LOST_HUB = re.compile(r"rank (\d+) \(host host\d+\) cannot reach the host of rank 0")
"""Message of ranks whose link to rank 0's host is cut, or all of whose links are."""


@dataclass(frozen=True)
class Judged:
    """Judgement of a fault's report: `named` its rank only, `placed` with the place; `wrong`: another rank.

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
    ranks = _named(outcome)
    named = ranks == (injection.rank,)
    placed = named and _is_placed(plan, injection, outcome)
    if injection.kind == "cut" and injection.rank == 0:
        lost = {int(rank) for rank in LOST_HUB.findall(outcome.said)}
        named = placed = not ranks and lost == set(range(1, plan.mesh.size))
    return Judged(
        injection,
        named=named,
        placed=placed,
        wrong=any(rank != injection.rank for rank in ranks),
        silent=outcome.code == 0 and outcome.report is None,
        told_s=outcome.told_s,
        left=outcome.left,
        code=outcome.code,
        said=outcome.said,
    )


def _named(outcome: Outcome) -> tuple[int, ...]:
    """Return the ranks that are named: by the report, or as those whose job is another one."""
    if outcome.report is not None:
        return outcome.report.ranks
    found = ODD_RANKS.search(outcome.said)
    return () if found is None else tuple(map(int, re.findall(r"\d+", found[0])))


def _is_placed(plan: qs.Plan, injection: Injection, outcome: Outcome) -> bool:
    """Whether the culprit's instruction, microbatch and peer, its phase, or setting, are those of the fault."""
    if injection.kind == "odd":
        return f" {injection.odd.partition('=')[0]} is " in outcome.said
    (culprit,) = outcome.report.culprits
    if injection.index is None:
        return culprit.phase == PHASE_NAMES[injection.phase]
    expected = plan.program(injection.rank)[injection.index]
    place = culprit.place
    seen = place.index, place.instruction, place.microbatch, place.peer
    microbatch, peer = getattr(expected, "microbatch", None), getattr(expected, "peer", None)
    return seen == (injection.index, str(expected), microbatch, peer)


def judge_all(
    injections: Sequence[Injection], folder: Path, mesh: str, *, at_once: int = 2, cut: Any = None, **settings: Any
) -> list[Judged]:
    """Run a job of a mesh once with each fault, several at a time, and judge what was said; `cut` runs cut links."""
    plan = plan_of_job(mesh, **settings)

    def run(numbered: tuple[int, Injection]) -> Judged:
        number, injection = numbered
        own = folder / str(number)
        run_it = partial(cut, plan.mesh.size) if injection.kind == "cut" else run_with
        judged = judge(plan, injection, run_it(injection, own, job_settings(own, mesh, **settings)))
        rmtree(own, ignore_errors=True)
        return judged

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(run, enumerate(injections)))
