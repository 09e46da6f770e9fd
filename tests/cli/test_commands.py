"""Each command as people and as programs use it."""

import re

import pytest


def test_check_a_plan(cli, plan_file):
    shown = cli("check", plan_file)
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith("sound: ")
    data = cli("check", plan_file, "--profile", "blocking", "--json").data
    assert data["sound"] is True
    assert data["profile"] == "blocking"
    assert set(data["profiles"].values()) == {True}
    assert data["peak_activations"] == [2, 1]


def test_simulate(cli, plan_file, tmp_path):
    shown = cli("simulate", plan_file).out
    assert "makespan     15 " in shown
    assert "bubble       20.0 %" in shown
    assert "span bubble  20.0 %" in shown
    assert "time in forward\n" in shown
    assert "critical path: rank 0: F0 → rank 1: F0 B0" in shown
    data = cli("simulate", plan_file, "--json").data
    assert (data["makespan"], data["bubble"], data["peak_activations"]) == (15, 1 - 12 / 15, [2, 1])
    costs = tmp_path / "costs.json"
    costs.write_text('{"unit": "ms", "forward": 2, "backward_input": 2, "backward_weight": 2}')
    data = cli("simulate", plan_file, "--costs", costs, "--json").data
    assert (data["makespan"], data["unit"]) == (30, "ms")


def test_compare_gives_each_schedule_what_it_takes(cli):
    shown = cli("compare", "1f1b", "seq-1f1b", "bfs", "--pp", 4, "-m", 8, "--slices", 2, "--chunks", 4)
    assert re.findall(r"^(\S+) +(\d+) +(\d+) +([\d.]+)  ", shown.out, re.MULTILINE) == [
        ("1f1b", "1", "1", "33"),
        ("seq-1f1b", "1", "2", "28.5"),
        ("bfs", "4", "1", "26.25"),
    ]
    assert "zb-auto   1       1       41 " in cli("compare", "zb-auto", "--pp", 4, "-m", 8, "--memory-cap", 2).out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "job.yaml"), "there is no command 'train'; did you mean 'quintsched run'?"),
        (("compile", "-s", "1f1b", "--mesh", "", "-m", 2), "mesh: '' names no axis (a variable that is not set?)"),
        (("predict", "--model", "gpt3-175b", "--hardware", "h100", "--mesh", " "), "mesh: ' ' names no axis"),
    ],
)
def test_what_is_meant_is_said(refused, words, said):
    assert said in refused(2, *words)


def test_a_real_picture(cli, refused, plan_file, tmp_path):
    pytest.importorskip("matplotlib")
    assert cli("render", plan_file, "-o", "out.svg").out == "out.svg: 1f1b on dp=2,pp=2,tp=2, 4 microbatches\n"
    assert cli("render", plan_file, "-o", "out.PNG", "--json").data["makespan"] == 15
    assert cli("compare", "1f1b", "gpipe", "--pp", 2, "-m", 2, "-o", "both.svg").code == 0
    assert (tmp_path / "out.PNG").read_bytes().startswith(b"\x89PNG")
    one, both = ((tmp_path / name).read_text() for name in ("out.svg", "both.svg"))
    assert ("gpipe on" in one, "gpipe on" in both, "1f1b on" in both) == (False, True, True)
    assert "cannot write the picture" in refused(2, "render", plan_file, "-o", "no/such/folder.png")


MESH = ("--mesh", "pp=2", "-m", 4)
INTERLEAVED = ("interleaved-1f1b", *MESH, "--chunks", 2)
TIED = ("1f1b", "--mesh", "dp=2,pp=3", "-m", 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f1b", *MESH, "--costs", "costs.json"), "does not depend on costs or a memory cap"),
        (("1f1b", *MESH, "--recompute", "all"), "--recompute: cannot read 'all'; write whole numbers"),
        ((*TIED, "--tied", "embedding"), "--tied: cannot read 'embedding'; write a name and the stages"),
        ((*TIED, "--tied", "w=0,1", "--tied", "w=0,2"), "'w' is given twice"),
        ((*INTERLEAVED, "--skip", "h"), "--skip: cannot read 'h'; write a name and the stages that make and take it"),
        (("dualpipe", *MESH, "--skip", "h=0,1"), "take 2 routes; skips need a single one"),
        (("dualpipe", *MESH, "--losses", "0,1"), "take 2 routes, of which only the last stage can have one"),
        (("1f1b", *MESH, "--zero", 1), "has none"),
    ],
)
def test_options_that_cannot_be(refused, tmp_path, arguments, words):
    (tmp_path / "costs.json").write_text("{}")
    assert words in refused(2, "compile", "-s", *arguments)
