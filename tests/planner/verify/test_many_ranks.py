"""Proofs of plans on many ranks: what is said stays short, and nothing is looked at once for every pair of ranks."""

from dataclasses import replace

import pytest

import quintsched as qs
from quintsched.graph.plan_events import carried
from quintsched.ir.diagnostics import Point
from quintsched.ir.instruction_set import Bwd, Message, ReduceScatterBucket, ShareMetrics
from quintsched.plan import Plan
from quintsched.verify import soundness


@pytest.fixture(scope="module")
def long() -> Plan:
    return qs.compile("1f1b", mesh="pp=400", microbatches=2)


def test_a_group_of_many_ranks_is_named_in_few_words(long):
    first, *others = long.programs
    broken = replace(long, programs=[[i for i in first if not isinstance(i, ShareMetrics)], *others])
    found = [finding for finding in broken.check().findings if finding.point is Point.COLLECTIVES]
    assert len(found) == 399
    assert "over ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, …, 399, but rank 0" in found[0].message


def test_crossed_channels_are_looked_at_together(long, monkeypatch):
    """Each channel's first message is swapped with its second, on the side of the sender."""
    looks = []
    monkeypatch.setattr(soundness, "carried", lambda plan, rows: looks.append(len(rows)) or carried(plan, rows))
    other = {0: 1, 1: 0}
    programs = [
        [
            replace(i, microbatch=other[i.microbatch]) if isinstance(i, Message) and i.op == "SendAct" else i
            for i in program
        ]
        for program in long.programs
    ]
    found = [f for f in replace(long, programs=programs).check().findings if f.point is Point.CHANNELS]
    assert len(found) == 399
    assert found[0].message.startswith("channel 0→1, message 0: rank 0 instruction ")
    assert "sends the output of stage 0, microbatch 1, but" in found[0].message
    assert len(looks) == 2


def test_gradients_that_nothing_makes_are_in_no_reduction():
    plan = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=3, zero=2)
    assert plan.layout.num_reductions.tolist() == [3, 3]
    programs = [[i for i in program if i != Bwd(0, 1)] for program in plan.programs]
    missing = replace(plan, programs=programs)
    assert missing.layout.reduction_of.tolist() == [[0, -1, 1], [0, 1, 2]]
    messages = [finding.message for finding in missing.check().findings]
    assert any(ReduceScatterBucket.__name__ in message and "out of range" in message for message in messages)
    none = replace(plan, programs=[[i for i in program if not isinstance(i, Bwd)] for program in plan.programs])
    assert none.layout.num_reductions.tolist() == [0, 0]
    assert "the gradients of the stage have 0" in none.check().findings[0].message
