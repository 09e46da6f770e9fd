"""`quintsched solve`, `certify`, `whatif` and `layout`: plans, certificates and cuts in files, and wrong requests."""

import json
from pathlib import Path

import pytest

import quintsched as qs
from tests.layers import ROOT


def test_a_solved_plan_is_an_ordinary_plan_with_a_certificate(cli, tmp_path):
    plan, certificate, log = tmp_path / "plan.json", tmp_path / "certificate.json", tmp_path / "log.jsonl"
    files = ("-o", plan, "--certificate", certificate, "--log", log)
    found = cli("solve", "--pp", 4, "-m", 8, "--memory-cap", 2, "--placement", "linear", "--effort", 1, *files)
    assert found.code == 0
    assert found.out.startswith("span 41 forward, makespan 41, placement linear")
    assert "optimal, proved by the solver" in found.out
    assert cli("check", plan).code == 0
    assert json.loads(log.read_text().splitlines()[-1])["value"] == 41
    told = cli("certify", plan, certificate)
    assert (told.code, told.out.startswith("certified: span 41, at least 37 (rank 0 by memory)")) == (0, True)
    certificate.write_text(certificate.read_text().replace('"bound": 37.0', '"bound": 38.0'))
    told = cli("certify", plan, certificate)
    assert (told.code, "proves 37 only" in told.err) == (1, True)
    certificate.write_text("{}")
    assert cli("certify", plan, certificate).code == 1


def test_stages_that_recompute_and_offloading_are_named(cli):
    sizes = ("solve", "--pp", 4, "-m", 8, "--memory-cap", 2, "--placement", "linear", "--effort", 1)
    assert "placement linear, recomputing stage 0, stage 1, found by" in cli(*sizes, "--recompute", "1,1,0,0").out
    found = cli(*sizes, "--recompute", "all", "--offload", "--json")
    assert json.loads(found.out).keys() >= {"recompute", "offloads"}
    for wrong, why in (
        ("1,1,0", "recompute has 3 values, but there are 4 stages"),
        ("1,2,0,0", "give none, all, auto"),
    ):
        told = cli(*sizes, "--recompute", wrong)
        assert (told.code, why in told.err) == (2 if "give" in why else 1, True)


def test_json_and_wrong_requests(cli):
    found = cli("solve", "--pp", 2, "-m", 4, "--effort", 1, "--json")
    data = json.loads(found.out)
    assert data["status"] == "certified"
    assert data.keys() >= {"makespan", "span", "bound", "gap", "seconds"}
    told = cli("solve", "--pp", 2, "-m", 4, "--memory-cap", 0.5)
    assert (told.code, "the smallest that works: 1" in told.err) == (2, True)
    told = cli("solve", "--pp", 2, "-m", 4, "--memory-cap", "2,x")
    assert (told.code, "one for each rank: 4,3,3,2" in told.err) == (2, True)
    assert json.loads(cli("solve", "--pp", 2, "-m", 4, "--memory-cap", "2,1", "--effort", 1, "--json").out)["bound"] > 0
    assert cli("solve", "--pp", 2, "-m", 4, "--objective", "period").code == 2
    for files, why in (
        (("-o", "none/plan.json"), "none/plan.json: cannot write the result: No such file"),
        (("-o", "plan.json", "--log", "./plan.json"), "give each its own"),
    ):
        told = cli("solve", "--pp", 2, "-m", 4, *files)
        assert (told.code, why in told.err) == (2, True)


LAYERS = ROOT / "examples" / "layers.json"


def test_a_cut_is_printed_and_its_plan_is_written(cli, tmp_path):
    sizes = ("--costs", LAYERS, "--pp", 4, "--vpp", 2, "-m", 16, "--effort", 1)
    done = cli("layout", *sizes, "--against", "Et*4|(t*4|)*6t*2,L", "-o", tmp_path / "plan.json")
    assert done.code == 0
    assert "--stages 5,4,4,4,4,4,4,3\nMegatron-LM: Et*4|(t*4|)*6,ttL\n" in done.out
    assert "Et*4|(t*4|)*6t*2,L: " in done.out
    assert qs.Plan.load(tmp_path / "plan.json").blocks_per_stage == (5, 4, 4, 4, 4, 4, 4, 3)
    data = json.loads(cli("layout", *sizes, "--json").out)
    assert data["value"] < data["even"]
    (tmp_path / "costs.json").write_text(json.dumps(data["costs"]))
    simulated = cli("simulate", "plan.json", "--costs", "costs.json", "--json").data
    assert simulated["span"] == pytest.approx(data["value"])


def test_costs_may_be_predicted(cli):
    flags = ("--model", "llama-3-8b", "--hardware", "h100", "--pp", 4, "--tp", 2, "-m", 8, "--effort", 1, "--json")
    data = json.loads(cli("layout", *flags).out)
    assert sum(data["stages"]) == 34
    assert data["stages"][3] < data["stages"][1]
    assert data["gain"] > 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ((), "give one of --costs, --model and --trace"),
        (("--costs", LAYERS, "--pp", 4), "-m, that of microbatches"),
        (("--costs", LAYERS, "--pp", 4, "-m", 8, "--zero", 1), "--zero is for --model"),
        (("--costs", LAYERS, "--pp", 4, "-m", 8, "--schedule", "zbv"), "chunks"),
        (("--costs", LAYERS, "--pp", 4, "-m", 8, "--objective", "period"), 'give "span" or "makespan"'),
        (("--costs", LAYERS, "--pp", 4, "-m", 8, "--seconds", "nan"), "seconds is nan; give a positive number"),
        (("--costs", LAYERS, "--pp", 4, "-m", 8, "-o", "none/plan.json"), "none/plan.json: cannot write the result"),
        (("--trace", "nowhere"), "--trace needs the plan"),
        (("--model", "llama-3-8b", "--hardware", "h100", "--pp", 4), "or -m, the number of microbatches"),
    ],
)
def test_layouts_that_cannot_be_made(cli, options, why):
    told = cli("layout", *options)
    assert (told.code, why in told.err) == (2, True), told.err


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
    data = cli("whatif", DATA, "--memory-cap", 8, "--effort", 1, "--seconds", 0.2, "--json").data
    assert (data["source"], data["memory_cap"], len(data["waits"])) == ("Primus", [8.0] * 8, 8)
    assert data["work"] + sum(cause["share"] for cause in data["causes"]) == pytest.approx(1, abs=0.001)
    assert data["better"]["whole"]["bound"] <= data["better"]["whole"]["makespan"]


def test_recordings_that_are_none(refused):
    for arguments, words in (
        (("nowhere",), "no such directory"),
        ((DATA, "--memory-cap", "all"), "give a number of microbatches, or same"),
        ((DATA, "--memory-cap", 0.5), "the smallest that works: 1"),
        ((DATA, "--step", 3), "step 3 was not recorded"),
        ((DATA, "--plan", "none/plan.json"), "none/plan.json: cannot write the result"),
        ((DATA, "--plan", "both", "--certificate", "both"), "--plan and --certificate name one file"),
    ):
        assert words in refused(2, "whatif", *arguments)
