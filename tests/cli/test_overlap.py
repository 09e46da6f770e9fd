"""`--overlap` on the command line: compiled, shown, timed, drawn, exported and imported."""

import json

import pytest

import quintsched as qs

COMPILE = ("compile", "--schedule", "dualpipe-v", "--mesh", "pp=2", "-m", 4)


@pytest.fixture
def pairs_file(cli, tmp_path):
    done = cli(*COMPILE, "--overlap", "-o", "pairs.json")
    assert done.code == 0
    assert "dualpipe-v on pp=2, 4 microbatches, 2 chunks, with overlap" in done.out
    return tmp_path / "pairs.json"


def test_compile_and_check(cli, pairs_file, tmp_path):
    plan = qs.Plan.load(pairs_file)
    assert plan == qs.compile("dualpipe-v", mesh="pp=2", microbatches=4, overlap=True)
    assert json.loads(pairs_file.read_text())["schedule"]["options"] == {"overlap": True}
    assert {"op": "Overlap", "forward": [0, 3], "backward": [3, 1]} in json.loads(pairs_file.read_text())["programs"][0]
    assert cli("check", pairs_file, "--profile", "blocking").code == 0
    cli(*COMPILE, "--no-overlap", "-o", "apart.json")
    assert qs.Plan.load(tmp_path / "apart.json") == qs.compile("dualpipe-v", mesh="pp=2", microbatches=4)


def test_a_schedule_without_pairs_is_refused(refused, tmp_path):
    message = refused(2, "compile", "--schedule", "1f1b", "--mesh", "pp=2", "-m", 4, "--overlap", "-o", "no.json")
    assert "1f1b: overlap: it has no forward and backward side by side that do not wait for each other" in message
    assert "choose among dualpipe, dualpipe-v, interleaved-1f1b" in message
    assert not (tmp_path / "no.json").exists()


def test_show_and_one_ranks_list(cli, pairs_file):
    grid = cli("show", pairs_file).out
    assert "0F3&3B1 -   ." in grid
    assert "Overlap(forward=(0, 3), backward=(3, 1))" in cli("show", pairs_file, "--rank", 0).out


def test_simulate_names_what_is_exchanged(cli, pairs_file, tmp_path):
    (tmp_path / "costs.json").write_text('{"exchange": 0.5}')
    data = cli("simulate", pairs_file, "--costs", "costs.json", "--json").data
    assert data["makespan"] == qs.Plan.load(pairs_file).simulate(qs.Costs(exchange=0.5)).makespan
    assert max(data["exchange"]) < 4.0, "pairs hide theirs"
    assert any("Overlap" in place["instruction"] for place in data["critical_path"])
