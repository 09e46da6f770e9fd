"""`show` and `render` of a part of a plan."""

import json

import pytest


@pytest.fixture
def plan_file(cli, tmp_path):
    cli("compile", "--schedule", "1f1b", "--mesh", "pp=4", "--microbatches", "8", "-o", "plan.json")
    return "plan.json"


def test_show_prints_the_part_that_is_asked_for(cli, plan_file):
    done = cli("show", plan_file, "--ranks", "1..2", "--time", "0..5")
    assert [line.split()[:4] for line in done.out.splitlines()[1:]] == [
        ["rank", "1", ".", "F0"],
        ["rank", "2", ".", "."],
    ]
    assert "ranks 1 to 2 of 4, time 0 to 5 of 33" in done.err
    assert cli("show", plan_file).err == ""
    assert len(cli("show", plan_file, "--ranks", "3", "--json").data["grid"]) == 1


def test_a_large_picture_is_an_overview_and_says_so(cli, tmp_path):
    pytest.importorskip("matplotlib")
    cli("compile", "--schedule", "1f1b", "--mesh", "pp=2", "--microbatches", "130", "-o", "large.json")
    assert "an overview" in cli("render", "large.json", "-o", "large.png").err
    assert cli("render", "large.json", "-o", "part.png", "--time", "10..40").err == ""
    assert json.loads((tmp_path / "large.json").read_text())["format"] == "quintsched.plan"


def test_a_plan_that_is_not_sound_gets_a_page_with_its_counter_example(refused, plan_file, tmp_path):
    plan = json.loads((tmp_path / plan_file).read_text())
    plan["programs"][0].pop(0)
    (tmp_path / "broken.json").write_text(json.dumps(plan))
    said = refused(1, "render", "broken.json", "-o", "broken.html")
    assert "rank 0 runs Fwd(stage=0, microbatch=0) 0 times" in said
    assert "broken.html shows it" in said
    assert (tmp_path / "broken.html").exists()
