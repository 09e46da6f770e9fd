"""A fault in a run that is executed without tensors is found by where ranks stand, and nobody else is ever named."""

import random

import pytest

import quintsched as qs
from quintsched.stalls.culprit import find_culprit

from .executor import Execution, Fault, faults_of

NAMES = [schedule.name for schedule in qs.all_schedules()]
MESHES = ("pp=2", "pp=4", "dp=2,pp=2", "pp=2,tp=2", "dp=2,pp=2,tp=2")
EXTRAS = ({}, {"zero": 2}, {"recompute": 1}, {"overlap": True})


def plans_of(name, rng):
    """Yield a plan of a schedule for each mesh that it takes, with one of the extras that it takes there."""
    for mesh in MESHES:
        for extra in rng.sample(EXTRAS, len(EXTRAS)):
            try:
                yield qs.compile(name, mesh=mesh, microbatches=4, **extra)
            except qs.QuintschedError:
                continue
            break


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["freeze", "skip"])
@pytest.mark.parametrize("name", NAMES)
def test_the_rank_and_the_instruction_are_named(name, kind):
    rng = random.Random(f"{name} {kind}")
    for plan in plans_of(name, rng):
        for ahead in (True, False):
            fault = faults_of(plan, rng, kind)
            execution = Execution(plan, fault, ahead=ahead, seed=rng.randrange(2**32))
            assert not execution.finished
            report = find_culprit(plan, execution.states(execution.now + 5, [0.1] * plan.mesh.size))
            (culprit,) = report.culprits
            assert (culprit.rank, culprit.place.index, culprit.step) == (fault.rank, fault.index, fault.step)
            instruction = plan.programs[plan.mesh.pp_rank(fault.rank)][fault.index]
            assert culprit.fault == ("stands" if kind == "freeze" else "skipped")
            assert culprit.place.microbatch == getattr(instruction, "microbatch", None)
            waiters = {link.waiter.rank for link in report.chain}
            assert waiters, "somebody waits for it"
            assert fault.rank not in waiters
            assert f"rank {fault.rank} (host a" in report.words()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rank", range(6))
def test_a_rank_is_named_at_every_instruction(rank):
    plan = qs.compile("1f1b", mesh="dp=2,pp=3", microbatches=4)
    for index in range(len(plan.programs[plan.mesh.pp_rank(rank)])):
        execution = Execution(plan, Fault("freeze", rank, 2, index))
        report = find_culprit(plan, execution.states(execution.now + 5, [0.1] * 6))
        assert report.ranks == (rank,)
        assert report.culprits[0].place.index == index
        assert {link.waiter.rank for link in report.chain} == set(range(6)) - {rank}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("says_waits", [True, False])
@pytest.mark.parametrize("kind", ["freeze", "skip", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_nobody_else_is_named_whenever_the_ranks_were_looked_at(name, kind, says_waits):
    rng = random.Random(f"{name} {kind} {says_waits}")
    for plan in plans_of(name, rng):
        fault = faults_of(plan, rng, kind)
        execution = Execution(plan, fault, ahead=rng.random() < 0.5, seed=rng.randrange(2**32))
        for _ in range(12):
            at, heard = rng.uniform(0, execution.now + 2), [rng.uniform(0, 0.3) for _ in range(plan.mesh.size)]
            report = find_culprit(plan, execution.states(at, heard, says_waits=says_waits))
            assert report.ranks in ((), (fault.rank,)) if kind != "none" else not report.ranks
