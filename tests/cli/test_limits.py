"""Files and plans that are too large: one clear error each."""

import pytest

import quintsched as qs

COMPILE = ("compile", "--mesh", "pp=2", "-m", 4)


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
        (*COMPILE, "-s", "zb-auto", "--costs", huge),
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
