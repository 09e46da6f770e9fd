"""Outputs that replace no link, FIFO or input, and inputs and plans that are too large."""

import os

import pytest

import quintsched as qs

COMPILE = ("compile", "-s", "1f1b", "--mesh", "pp=2", "-m", 2)


@pytest.fixture
def inputs(tmp_path):
    """A plan, costs, a CSV, a collective and a schedule, with a hard and a symbolic link to each."""
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
    plan.save(tmp_path / "p.json")
    (tmp_path / "c.json").write_text('{"forward": 2}')
    (tmp_path / "s.csv").write_text("0F0,0B0\n")
    (tmp_path / "s.py").write_text("")
    for path in list(tmp_path.iterdir()):
        (tmp_path / f"soft_{path.name}").symlink_to(path)
        (tmp_path / f"hard_{path.name}").hardlink_to(path)
    return {path.name: path.read_bytes() for path in tmp_path.iterdir()}


@pytest.mark.parametrize("link", ["", "soft_", "hard_"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("render", "p.json", "-o", "p.json"),
        ("render", "p.json", "--costs", "c.json", "-o", "c.json"),
        ("export", "p.json", "--to", "torch-csv", "-o", "p.json"),
        ("import", "s.csv", "-o", "s.csv"),
        ("simulate", "p.json", "-o", "p.json"),
        ("simulate", "p.json", "--costs", "c.json", "-o", "c.json"),
        (*COMPILE, "--costs", "c.json", "-o", "c.json"),
        ("compile", "-s", "s.py:mine", "--mesh", "pp=2", "-m", 2, "-o", "s.py"),
        ("collective", "c.json", "-o", "c.json"),
    ],
)
def test_no_command_overwrites_what_it_reads(refused, inputs, tmp_path, link, arguments):
    *others, output = arguments
    message = refused(2, *others, f"{link}{output}")
    assert f"{link}{output}: the command reads this file" in message
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == inputs


def test_a_full_disk_leaves_no_half_file(refused, plan_file, tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(os, "write", full)
    for arguments in (
        ("export", plan_file, "--to", "torch-csv", "-o", "out.csv"),
        ("collective", "ring", "--ranks", 3, "-o", "ring.json"),
        ("simulate", plan_file, "-o", "costs.json"),
        ("new", "mine.py"),
        (*COMPILE, "-o", "new.json"),
    ):
        assert "No space left on device" in refused(1, *arguments)
    assert sorted(tmp_path.iterdir()) == before


SIZES = ("compile", "--mesh", "pp=2", "-m", 4)


def test_a_file_that_is_too_long_is_not_read(refused, tmp_path):
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(3 * 2**30)
    message = f"it has {3 * 2**30} bytes, more than the"
    for arguments in (
        ("check", huge),
        ("show", huge),
        ("import", huge),
        ("collective", huge),
        ("export", huge, "--to", "promela"),
        (*SIZES, "-s", "zb-auto", "--costs", huge),
    ):
        assert message in refused(1, *arguments)
    with pytest.raises(qs.UsageError, match="/dev/zero: cannot read the plan: it is a device, not a file"):
        qs.Plan.load("/dev/zero")


def test_a_plan_that_no_file_holds_is_refused_before_the_work(refused, tmp_path):
    large = ("compile", "-s", "1f1b", "--mesh", "pp=64", "-m")
    said = refused(2, *large, 16000, "-o", tmp_path / "plan.json")
    assert "a plan file in JSON has at most 268435456; name it plan.qplan" in said
    assert "plan.json: the plan has at least 37" in said
    assert "instructions; a plan file has at most 8388608" in refused(2, *large, 32000, "-o", tmp_path / "plan.qplan")
