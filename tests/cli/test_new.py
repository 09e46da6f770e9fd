"""`quintsched new`: a template that is green as written; and `compile --print-after`, to watch what becomes of it."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import quintsched as qs
from quintsched import compiler
from quintsched.ir.diagnostics import Point
from quintsched.ir.instruction_set import AllReduceBucket, SendAct
from quintsched.passes import FORWARD_PASSES, TRAIN_PASSES, Pass
from quintsched.schedules.kit import registry
from quintsched.testing import smallest_failing_shape

from ..helpers.commands import run

PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")


@pytest.fixture
def fresh(cli, tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))  # what a test imports is forgotten after it
    done = cli("new", "my_schedule.py")
    assert (done.code, done.err) == (0, "")
    assert done.out == "my_schedule.py: a schedule and its property test; run: pytest my_schedule.py\n"
    return tmp_path / "my_schedule.py"


@pytest.mark.processes
def test_the_template_is_green_as_written(fresh):
    code, out, _ = run(*PYTEST, fresh.name)
    assert (code, "1 passed" in out) == (0, True), out


def test_the_template_works_with_the_other_commands(fresh, cli):
    target = "my_schedule.py:my_schedule"
    done = cli("check", target, "--pp", "1..4", "--microbatches", "1..4")
    assert done.out.startswith("my-schedule: of 16 shapes 16 sound, 0 refused, 0 unsound\n")
    assert cli("compile", "--schedule", target, "--mesh", "pp=2", "-m", 3, "-o", "plan.json").code == 0
    grid = cli("show", "plan.json").out.splitlines()[1:]
    drawn = [line.replace("--", "- ") for line in fresh.read_text().splitlines() if line.startswith("rank ")]
    assert [line.split()[2:] for line in grid] == [
        (line.split()[2:] + ["."] * 12)[: len(grid[0].split()) - 2] for line in drawn
    ], "the picture in the template is the schedule's"


BREAKS = {
    "the last loop is left out": (
        "range(shape.microbatches - warmup, shape.microbatches):\n        yield Bwd",
        "range(0):\n        yield Bwd",
        "the smallest shape that does: pp=2, 1 chunk, 1 microbatch",
        ["complete: rank 0 runs Bwd(stage=0, microbatch=0) 0 times instead of once", "rank 0  F0", "rank 1  F0 B0"],
    ),
    "the warm-up is the wrong way round": (
        "min(shape.pp - rank - 1, shape.microbatches)",
        "min(rank, shape.microbatches)",
        "the smallest shape that does: pp=2, 1 chunk, 2 microbatches",
        [
            "deadlock: the order of computation itself cannot run",
            "rank 0 is stuck at 1 Bwd(stage=0, microbatch=0): it needs the output's gradient of stage 0, microbatch 0; "
            "rank 1 makes it at 2 Bwd(stage=1, microbatch=0)",
            "rank 1 is stuck at 1 Fwd(stage=1, microbatch=1): it needs the output of stage 0, microbatch 1; "
            "rank 0 makes it at 2 Fwd(stage=0, microbatch=1)",
            "rank 0  F0 B0 F1 B1",
            "rank 1  F0 F1 B0 B1",
        ],
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.processes
@pytest.mark.parametrize("what", BREAKS)
def test_breaking_the_order_shows_the_smallest_shape(fresh, what):
    old, new, shape, lines = BREAKS[what]
    text = fresh.read_text()
    assert text.count(old) == 1
    fresh.write_text(text.replace(old, new))
    code, out, _ = run(*PYTEST, fresh.name)
    assert code == 1
    said = [line.removeprefix("E").strip() for line in out.splitlines() if line.startswith("E ")]
    assert said[0] == f"AssertionError: my-schedule fails; {shape}"
    assert len(said) < 15, "short enough to be read"
    for line in lines:
        assert line in said
    assert Path(smallest_failing_shape.__file__).name not in out, "the message is about the schedule, not the kit"


def test_nothing_is_overwritten(fresh, refused):
    fresh.write_text("mine")
    assert "my_schedule.py is there already" in refused(2, "new", "my_schedule.py")
    assert fresh.read_text() == "mine"


ARGUMENTS = ("compile", "-s", "1f1b", "--mesh", "dp=2,pp=2", "-m", 2, "-o", "plan.json")


def test_print_after_all(cli):
    done = cli(*ARGUMENTS, "--print-after", "all", "--json")
    assert done.data["sound"] is True
    heads = re.findall(r"^== after ([\w-]+): ", done.err, re.MULTILINE)
    assert heads == ["order", *(step.name for step in TRAIN_PASSES)]
    assert done.err.count("OptStep") == 2, "only after the last one"


def _without_the_last_send(plan):
    program = list(plan.programs[0])
    del program[max(k for k, i in enumerate(program) if isinstance(i, SendAct))]
    return replace(plan, programs=(tuple(program), *plan.programs[1:]))


def _sends_changed(plan):
    program = list(plan.programs[0])
    first, second = [k for k, i in enumerate(program) if isinstance(i, SendAct)][:2]
    program[first], program[second] = program[second], program[first]
    return replace(plan, programs=(tuple(program), *plan.programs[1:]))


def _without_reductions(plan):
    programs = (tuple(i for i in p if not isinstance(i, AllReduceBucket)) for p in plan.programs)
    return replace(plan, programs=tuple(programs))


def _metrics_on_one_rank(plan):
    return replace(plan, programs=(plan.programs[0][:-1], *plan.programs[1:]))


@pytest.mark.parametrize(
    ("after", "breaks", "blamed", "point", "words"),
    [
        ("place-messages", _without_the_last_send, "culprit", "channels", "channel 0→1: 3 sends but 4 receives"),
        ("sync-tied", _sends_changed, "culprit", "channels", "order is identity"),
        ("share-metrics", _metrics_on_one_rank, "culprit", "collectives", "but rank 0 issues nothing"),
        ("reduce-buckets", _without_reductions, "step-optimizer", "data flow", "the reduced gradient of stage 0"),
    ],
)
def test_a_pass_that_breaks_a_point_is_named(monkeypatch, after, breaks, blamed, point, words):
    """The pass that declares what does not hold is named: for the data flow of reductions, that is the last one."""
    culprit = Pass("culprit", breaks, ())
    at = [step.name for step in TRAIN_PASSES].index(after) + 1
    monkeypatch.setattr(compiler, "TRAIN_PASSES", (*TRAIN_PASSES[:at], culprit, *TRAIN_PASSES[at:]))
    seen = []
    with pytest.raises(qs.UnsoundError) as error:
        qs.compile("gpipe", mesh="dp=2,pp=2", microbatches=4, after=lambda name, _: seen.append(name))
    assert f"the pass {blamed!r} breaks the point {point!r}: " in str(error.value)
    assert words in str(error.value)
    assert seen[-1] == blamed


@pytest.mark.parametrize("passes", [TRAIN_PASSES, FORWARD_PASSES])
def test_all_passes_together_establish_soundness(passes):
    established = {point for step in passes for point in step.establishes}
    assert established == {*Point} - {Point.WELL_FORMED, Point.MEMORY}
