"""`quintsched new`: a template that is green as written; and `compile --print-after`, to watch what becomes of it."""

import re
import runpy
from pathlib import Path

import pytest

from quintsched.import_user_code import load_schedule
from quintsched.passes import TRAIN_PASSES
from quintsched.schedules.kit import registry
from quintsched.testing import assert_sound


@pytest.fixture
def fresh(cli, tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))  # what a test imports is forgotten after it
    done = cli("new", "my_schedule.py")
    assert (done.code, done.err) == (0, "")
    assert done.out == "my_schedule.py: a schedule and its property test; run: pytest my_schedule.py\n"
    return tmp_path / "my_schedule.py"


STUCK = (
    "my-schedule fails; the smallest shape that does: pp=2, 1 chunk, 2 microbatches",
    "deadlock: the order of computation itself cannot run",
    "rank 0 is stuck at 1 Bwd(stage=0, microbatch=0): it needs the output's gradient of stage 0, microbatch 0; "
    "rank 1 makes it at 2 Bwd(stage=1, microbatch=0)",
    "rank 0  F0 B0 F1 B1",
    "rank 1  F0 F1 B0 B1",
)
"""Lines of the message on a warm-up that is the wrong way round."""


def test_the_template_is_green_as_written(fresh):
    written = runpy.run_path(str(fresh))
    (test,) = (value for name, value in written.items() if name.startswith("test_"))
    test()


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


def test_breaking_the_order_shows_the_smallest_shape(fresh):
    right = fresh.read_text()
    fresh.write_text(right.replace("min(shape.pp - rank - 1, shape.microbatches)", "min(rank, shape.microbatches)"))
    with pytest.raises(AssertionError) as failed:
        assert_sound(load_schedule(f"{fresh}:my_schedule"))
    assert {*STUCK} <= {*str(failed.value).splitlines()}


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
