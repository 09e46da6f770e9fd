"""Every schedule and feature on 2, 4 and 8 ranks gives the numbers of one process, and goes on for many steps."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quintsched.schedules import all_schedules
from tests.runtime.grid import Case

from .machine import Machine
from .runs import FEATURES, FREE, OVERLAPPING, Run, of_schedules, of_the_grid
from .training import require_agreement, require_equal, train

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]
WORLDS = [pytest.param(world_size, marks=pytest.mark.ranks(world_size)) for world_size in (2, 4, 8)]
MANY_STEPS = 500
SOME_STEPS = {2: 500, 4: 100, 8: 20}
"""Ranks that share a GPU take turns on it: so many steps every run of the tests takes, 500 the long one."""

LASTING = {2: "dualpipe", 4: "zbv", 8: "1f1b"}
"""The schedule that goes through many steps; the long run takes all."""


def lasting_of(world_size: int) -> list[Run]:
    lasting = next(run for run in of_schedules(world_size) if run.case.schedule == LASTING[world_size])
    return [lasting, *(FREE if world_size == 2 else [])]


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_no_schedule_is_left_out(world_size: int) -> None:
    found = {run.case.schedule for run in of_schedules(world_size)}
    ours = [schedule for schedule in all_schedules() if schedule.order.__module__.startswith("quintsched.")]
    assert {schedule.name for schedule in ours if schedule.mode == "train"} <= found


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_schedule_equals_one_process(tmp_path: Path, machine: Machine, world_size: int) -> None:
    runs = of_schedules(world_size)
    require_equal(runs, train(machine, tmp_path, runs))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLDS)
def test_cases_of_the_grid_equal_one_process(tmp_path: Path, machine: Machine, world_size: int) -> None:
    runs = of_the_grid(world_size)
    require_equal(runs, train(machine, tmp_path, runs))


@pytest.mark.parametrize("world_size", WORLDS)
def test_many_steps_without_a_hang(tmp_path: Path, machine: Machine, world_size: int) -> None:
    steps = SOME_STEPS[world_size]
    require_agreement(train(machine, tmp_path, lasting_of(world_size), steps), steps)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLDS)
def test_five_hundred_steps_of_every_schedule(tmp_path: Path, machine: Machine, world_size: int) -> None:
    require_agreement(train(machine, tmp_path, of_schedules(world_size), MANY_STEPS), MANY_STEPS)


@pytest.mark.parametrize("world_size", WORLDS)
def test_overlap_changes_no_bit(tmp_path: Path, machine: Machine, world_size: int) -> None:
    overlapped = OVERLAPPING[world_size]
    both: list[Case] = [replace(overlapped, overlap=False), overlapped]
    plain, beside = train(machine, tmp_path, [Run(str(case), case) for case in both], 5).values()
    for one, other in zip(plain, beside, strict=True):
        assert one.losses == other.losses
        assert all(torch.equal(weight, other.weights[name]) for name, weight in one.weights.items())


@pytest.mark.parametrize("world_size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (2, 4)])
def test_what_a_plan_can_have_equals_one_process(tmp_path: Path, machine: Machine, world_size: int) -> None:
    runs = [run for run in FEATURES if run.world_size == world_size]
    require_equal(runs, train(machine, tmp_path, runs))
