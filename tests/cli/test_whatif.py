"""`quintsched whatif` on the command line."""

from pathlib import Path

import pytest

DATA = Path(__file__).parents[1] / "data" / "primus"


def test_it_tells_causes_and_a_better_order_in_words_json_and_a_picture(cli, tmp_path):
    pytest.importorskip("matplotlib")
    files = ("--plan", "plan.json", "--certificate", "certificate.json", "-o", "both.svg")
    found = cli("whatif", DATA, "--step", 8, "--effort", 1, "--seconds", 1, *files)
    assert found.code == 0
    assert found.out.startswith("Primus: recorded on pp=8, 16 microbatches; step 8, of 4 recorded\nmeasured 3245 ms")
    assert "from computations -1.04 %, with 0.804 ms for each message +0.04 %, from all parts +0.00 %" in found.out
    assert "warm-up       28.2 %" in found.out
    assert "stage 7 on rank 7, 1.09 of the mean" in found.out
    assert "split backwards: both halves are taken to be equally long" in found.out
    assert (tmp_path / "both.svg").read_text().startswith("<?xml")
    assert cli("certify", "plan.json", "certificate.json").out.startswith("certified: makespan 3")
    data = cli("whatif", DATA, "--memory-cap", 8, "--effort", 1, "--seconds", 1, "--json").data
    assert (data["source"], data["memory_cap"], len(data["waits"])) == ("Primus", [8.0] * 8, 8)
    assert data["work"] + sum(cause["share"] for cause in data["causes"]) == pytest.approx(1, abs=0.001)
    assert data["better"]["whole"]["bound"] <= data["better"]["whole"]["makespan"]


def test_wrong_requests(refused):
    for arguments, words in (
        (("nowhere",), "no such directory"),
        ((DATA, "--memory-cap", "all"), "give a number of microbatches, or same"),
        ((DATA, "--memory-cap", 0.5), "the smallest that works: 1"),
        ((DATA, "--step", 3), "step 3 was not recorded"),
        ((DATA, "--plan", "none/plan.json"), "none/plan.json: cannot write the result"),
        ((DATA, "--plan", "both", "--certificate", "both"), "--plan and --certificate name one file"),
    ):
        assert words in refused(2, "whatif", *arguments)
