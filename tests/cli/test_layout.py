"""`quintsched layout`: costs of layers in, the cut in three spellings out."""

import json

import pytest

import quintsched as qs
from tests.layers import ROOT

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
def test_wrong_requests(cli, options, why):
    told = cli("layout", *options)
    assert (told.code, why in told.err) == (2, True), told.err
