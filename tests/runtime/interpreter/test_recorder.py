"""The recorder: a step that breaks off leaves nothing, steps that nobody asked for no file, and a GPU its events."""

import numpy as np
import pytest
import torch

import quintsched as qs
from quintsched.runtime.interpreter.busy_clock import EventClock
from quintsched.runtime.interpreter.trace_recorder import RECORDED_STEPS, Recorder
from quintsched.trace.measured_trace import Trace

PLAN = qs.compile("1f1b", mesh="pp=2", microbatches=2)
CPU = torch.device("cpu")


class FakeClock:
    """Every look at it is a second later."""

    def __init__(self):
        self.time, self.times_set = 0.0, 0

    def set(self):
        self.times_set += 1

    def now(self):
        self.time += 1
        return self.time

    def wall_s(self, stamp):
        return stamp


@pytest.fixture
def clock(monkeypatch):
    made = FakeClock()
    monkeypatch.setattr("quintsched.runtime.interpreter.trace_recorder.HostClock", lambda: made)
    return made


def nothing():
    pass


def record_plain(recorder, rank, steps):
    calls = [recorder.wrap(index, nothing) for index in range(len(PLAN.programs[rank]))]
    for step in steps:
        recorder.begin_step(step)
        for call in calls if recorder.active else ():
            call()
        recorder.end_step()


def load(tmp_path, recorder):
    other = Recorder(PLAN, 1, CPU, steps=recorder._steps)
    record_plain(other, 1, sorted(recorder._steps))
    for each in (recorder, other):
        each.save_trace(tmp_path)
    return Trace.load(tmp_path, PLAN)


def test_a_step_that_broke_off_leaves_nothing_behind(tmp_path, clock):
    recorder = Recorder(PLAN, 0, CPU, steps=[2, 3])
    recorder.begin_step(2)
    recorder.mark(0, start=1.0, end=9.0)
    recorder.add_wait(0, 1.0, 9.0)
    record_plain(recorder, 0, [2, 3])
    of_rank = load(tmp_path, recorder).ranks[0]
    assert of_rank.steps == (2, 3)
    assert of_rank.end[0, 0] - of_rank.start[0, 0] == 1
    assert not of_rank.wait.any()


def test_nothing_is_written_where_nothing_was_recorded(tmp_path):
    recorder = Recorder(PLAN, 0, CPU)
    record_plain(recorder, 0, [0, 1, RECORDED_STEPS.stop, RECORDED_STEPS.stop + 1])
    recorder.save_trace(tmp_path)
    assert not list(tmp_path.iterdir())


class FakeEvent:
    """A CUDA event of a GPU that needs a millisecond from each to the next."""

    recorded = 0

    def __init__(self, device, enable_timing):
        assert enable_timing

    def record(self):
        FakeEvent.recorded += 1
        self.at_ms = FakeEvent.recorded

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        return float(later.at_ms - self.at_ms)


def test_on_a_gpu_events_are_the_stamps(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "Event", FakeEvent)
    recorder = Recorder(PLAN, 0, torch.device("cuda"), steps=[2])
    assert isinstance(recorder._clock, EventClock)
    record_plain(recorder, 0, [2])
    of_rank = load(tmp_path, recorder).ranks[0]
    assert of_rank.end - of_rank.start == pytest.approx(np.full_like(of_rank.start, 0.001), abs=1e-6)
    assert np.diff(of_rank.start) == pytest.approx(np.full_like(of_rank.start[:, 1:], 0.002), abs=1e-6)
