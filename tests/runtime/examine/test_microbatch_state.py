"""Numbers that forwards change are named when they first change, whatever shapes have told, and once."""

import logging

import torch
from torch import nn

from quintsched.runtime.examine.microbatch_state import LateState

RUNS = 0


class Counter(nn.Module):
    total = 0

    def __init__(self):
        super().__init__()
        self.go, self.calls, self.amax, self.rate = False, 0, 1.0, 0.1

    def forward(self, x):
        self.amax = max(self.amax, float(x.max()))
        if self.go:
            self.count()
        return x * self.rate

    def count(self):
        global RUNS
        self.calls += 1
        type(self).total += 1
        RUNS += 1


def test_what_begins_late_is_named_once(caplog):
    model = nn.Sequential(Counter(), nn.Linear(1, 1))
    state, lines = LateState({"3": model}), []
    for step in range(5):
        model[0].rate *= 0.5
        model[0].go = step > 1
        state.begin()
        model(torch.ones(1, 1) + (step == 1))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "quintsched"):
            state.tell(2, 2)
        lines.append([record.message.partition(": ")[0] for record in caplog.records])
    amax, calls = "block 3 (Sequential).0.amax", "block 3 (Sequential).0.calls"
    assert lines == [[], [amax] * 2, [f"{calls}, Counter.total, RUNS"] * 2, [], []]


def test_what_was_named_before_is_not_said_again(caplog):
    model = Counter()
    state = LateState({"0": model})
    state.known, model.go = ["block 0 (Counter).calls", "Counter.total", "RUNS"], True
    state.begin()
    model(torch.ones(1, 1))
    state.tell(2, 1)
    assert not caplog.records
