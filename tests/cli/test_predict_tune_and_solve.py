"""`quintsched predict`, `tune`, `solve`, `certify`, `whatif` and `layout`: what they say and write; wrong requests."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import quintsched as qs
from quintsched.strategies.commands.flags import option_of
from tests.layers import ROOT

GPT3 = {"model": "gpt3-175b", "hardware": "a100-80gb", "gpus": 64, "tp": 8, "pp": 8, "batch": 64, "seq": 2048}
INTERLEAVED = {**GPT3, "chunks": 3, "recompute": "selective", "sequence_parallel": True}
TINY = {"layers": 8, "hidden": 64, "heads": 8, "vocab": 512, "seq": 128}


def flags(row: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for name, value in row.items():
        found += [option_of(name)] if value is True else [option_of(name), str(value)]
    return found


def test_a_table_for_people(cli) -> None:
    found = cli("predict", *flags(INTERLEAVED), "--json").data
    lines = cli("predict", *flags(INTERLEAVED)).out.splitlines()
    assert lines[0] == (
        "gpt3-175b on 64 a100-80gb: pp=8,tp=8; microbatch 1; interleaved-1f1b, 3 chunks; selective recomputation; "
        "sequence-parallel; bf16"
    )
    assert lines[1].startswith(f"step        {found['step_s']:.2f} s")
    text = "\n".join(lines)
    for words in ("forward and backward", "tp communication", "pipeline bubble", "recomputation", "optimizer"):
        assert words in text
    assert "cp communication" not in text


def test_rows_give_an_object_each(cli) -> None:
    rows: list[Any] = [
        INTERLEAVED,
        {**INTERLEAVED, "tp": 7},
        {**INTERLEAVED, "colour": "red"},
        3,
        {name: value for name, value in INTERLEAVED.items() if name != "gpus"},
        {"model": TINY, "hardware": "l4", "batch": 8},
        {"model": {"layers": 0}, "hardware": "l4", "batch": 8},
    ]
    Path("rows.json").write_text(json.dumps(rows))
    found = cli("predict", "--rows", "rows.json", "--json").data
    assert len(found) == len(rows)
    assert found[0] == found[4] == cli("predict", *flags(INTERLEAVED), "--json").data
    assert "cannot be shared out" in found[1]["error"]
    assert "unknown key 'colour'" in found[2]["error"]
    assert "a row is an object" in found[3]["error"]
    assert found[5]["strategy"]["gpus"] == 1
    assert "layers" in found[6]["error"]


def test_flags_are_what_rows_leave_out(cli) -> None:
    Path("rows.json").write_text(json.dumps([{"tp": 8}, {"tp": 4, "batch": 32}]))
    rest = {name: value for name, value in GPT3.items() if name != "tp"}
    one, two = cli("predict", "--rows", "rows.json", *flags(rest), "--json").data
    assert one == cli("predict", *flags(GPT3), "--json").data
    assert (two["strategy"]["tp"], two["strategy"]["dp"], two["strategy"]["batch"]) == (4, 2, 32)


@pytest.mark.slow
@pytest.mark.processes
def test_a_job_and_its_plan(cli, root, tmp_path) -> None:
    job = root / "examples" / "text_4d.yaml"
    found = cli("predict", job, "--hardware", "l4", "--json").data
    strategy = found["strategy"]
    axes = {axis: strategy[axis] for axis in ("dp", "pp", "cp", "tp")}
    assert axes == {"dp": 2, "pp": 2, "cp": 2, "tp": 2}
    assert (strategy["dtype"], strategy["microbatch"], strategy["stages"]) == ("fp32", 8, [2, 2])
    qs.compile("gpipe", mesh="pp=4", microbatches=4, recompute=1).save(tmp_path / "plan.json")
    cli("predict", "plan.json", job, "--hardware", "l4", code=3)
    (tmp_path / "job.yaml").write_text("model: {name: vit, options: {depth: 6}}\ntrain: {batch_size: 16}\n")
    found = cli("predict", "plan.json", "job.yaml", "--hardware", "l4", "--zero", "0", "--json").data["strategy"]
    assert (found["pp"], found["schedule"], found["recompute"], found["seq"]) == (4, "gpipe", "full", 17)
    assert sum(found["stages"]) == 6


def test_one_strategy_is_predicted_and_written_as_a_framework_runs_it(tmp_path: Path, cli, refused) -> None:
    asked = ["--model", "llama-3-405b", "--hardware", "h100", "--gpus", "1024", "--batch", "512", "--pp", "16"]
    asked += ["--tp", "8", "--emit", str(tmp_path), "--json"]
    found = cli("predict", *asked, "--for", "megatron", "--chunks", "8").data
    assert found["strategy"]["fused_accumulation"]
    lines = (tmp_path / "megatron.args").read_text(encoding="utf-8").splitlines()
    assert {"--account-for-embedding-in-pipeline-split", "--num-virtual-stages-per-pipeline-rank 8"} <= {*lines}
    found = cli("predict", *asked, "--for", "torchtitan").data
    assert (found["strategy"]["zero"], found["strategy"]["sequence_parallel"]) == (2, True)
    assert "does not run zero 1" in refused(2, "predict", *asked, "--for", "torchtitan", "--zero", "1")


SMALL = ("--model", "llama-2-7b", "--hardware", "a100-80gb", "--gpus", "16", "--batch", "64", "--seq", "2048")
FEW = (*SMALL, "--cp", "1", "--zero", "0,1", "--schedule", "1f1b", "--recompute", "none,full", "--microbatch", "1,2")


def test_the_best_come_first(cli) -> None:
    found = cli("tune", *SMALL, "--cp", "1", "--json").data
    steps = [one["step_s"] for one in found["strategies"]]
    assert len(steps) == 10
    assert steps == sorted(steps)
    assert all(one["fits"] for one in found["strategies"])
    assert {"memory_bytes", "mfu", "tokens_per_s", "breakdown_s", "breakdown_bytes"} <= set(found["strategies"][0])
    front = [(point["step_s"], point["memory_bytes"]) for point in found["front"]]
    assert front[0][0] == pytest.approx(steps[0])
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(front))
    assert found["considered"] > found["evaluated"] > 0
    assert found["reason"][0].startswith("why: ")


ONE = ("--cp", "1", "--zero", "0", "--schedule", "1f1b", "--recompute", "full")


def test_where_nothing_fits_the_exit_code_says_so(refused) -> None:
    words = refused(3, "tune", "--model", "gpt3-175b", "--hardware", "l4", "--gpus", "8", "--batch", "8", *ONE)
    assert "fits" in words


def test_why_another_strategy_lost(cli) -> None:
    lines = cli("tune", *FEW, "--explain", "tp=8,microbatch=1").out.splitlines()
    assert any(" slower than the best: " in line for line in lines)
    data = cli("tune", *FEW, "--explain", "tp=1,pp=1,recompute=none,zero=0", "--json").data["explanation"]
    assert data["fits"] is False
    assert data["reason"][0].startswith("judged: ")
    assert "does not fit" in data["reason"][1]
    assert "smallest change" in data["reason"][2]


def test_the_best_is_written_as_plan_and_job(cli, tmp_path) -> None:
    found = cli("tune", *FEW, "--emit", tmp_path / "best", "--json").data
    plan = qs.Plan.load(found["files"]["plan"])
    assert plan.check().sound
    assert plan.mesh.size == 16
    assert found["files"]["job"] == str(tmp_path / "best" / "job.yaml")
    assert "run it: quintsched run" in cli("tune", *FEW, "--emit", tmp_path / "best").out


def test_a_solved_plan_is_an_ordinary_plan_with_a_certificate(cli, refused, tmp_path):
    plan, certificate, log = tmp_path / "plan.json", tmp_path / "certificate.json", tmp_path / "log.jsonl"
    files = ("-o", plan, "--certificate", certificate, "--log", log)
    found = cli("solve", "--pp", 4, "-m", 8, "--memory-cap", 2, "--placement", "linear", "--effort", 1, *files)
    assert found.out.startswith("span 41 forward, makespan 41, placement linear")
    assert "optimal, proved by the solver" in found.out
    cli("check", plan)
    assert json.loads(log.read_text().splitlines()[-1])["value"] == 41
    assert cli("certify", plan, certificate).out.startswith("certified: span 41, at least 37 (rank 0 by memory)")
    certificate.write_text(certificate.read_text().replace('"bound": 37.0', '"bound": 38.0'))
    assert "proves 37 only" in refused(1, "certify", plan, certificate)
    certificate.write_text("{}")
    refused(1, "certify", plan, certificate)


def test_stages_that_recompute_and_offloading_are_named(cli, refused):
    sizes = ("solve", "--pp", 4, "-m", 8, "--memory-cap", 2, "--placement", "linear", "--effort", 1)
    assert "placement linear, recomputing stage 0, stage 1, found by" in cli(*sizes, "--recompute", "1,1,0,0").out
    assert cli(*sizes, "--recompute", "all", "--offload", "--json").data.keys() >= {"recompute", "offloads", "lends"}
    small = ("solve", "--pp", 2, "-m", 3, "--memory-cap", 1, "--placement", "linear", "--effort", 1)
    assert "recomputing stage 0 (microbatches 1-2), found" in cli(*small, "--recompute", "auto").out
    found = cli(*small, "--recompute", "auto", "--json").data
    assert (found["recompute"], found["recompute_microbatches"]) == ([1, 0], [[1, 2], []])
    assert "recompute has 3 values, but there are 4 stages" in refused(1, *sizes, "--recompute", "1,1,0")


def test_solutions_in_json(cli):
    sizes = ("solve", "--pp", 2, "-m", 4)
    data = cli(*sizes, "--effort", 1, "--json").data
    assert data["status"] == "certified"
    assert data.keys() >= {"makespan", "span", "bound", "gap", "seconds"}
    assert cli(*sizes, "--memory-cap", "2,1", "--effort", 1, "--json").data["bound"] > 0


LAYERS = ROOT / "examples" / "layers.json"


def test_a_cut_is_printed_and_its_plan_is_written(cli, tmp_path):
    sizes = ("--costs", LAYERS, "--pp", 4, "--vpp", 2, "-m", 16, "--effort", 1)
    done = cli("layout", *sizes, "--against", "Et*4|(t*4|)*6t*2,L", "-o", tmp_path / "plan.json")
    assert "--stages 5,4,4,4,4,4,4,3\nMegatron-LM: Et*4|(t*4|)*6,ttL\n" in done.out
    assert "Et*4|(t*4|)*6t*2,L: " in done.out
    assert qs.Plan.load(tmp_path / "plan.json").blocks_per_stage == (5, 4, 4, 4, 4, 4, 4, 3)
    data = cli("layout", *sizes, "--json").data
    assert data["value"] < data["even"]
    (tmp_path / "costs.json").write_text(json.dumps(data["costs"]))
    simulated = cli("simulate", "plan.json", "--costs", "costs.json", "--json").data
    assert simulated["span"] == pytest.approx(data["value"])


def test_costs_may_be_predicted(cli):
    flags = ("--model", "llama-3-8b", "--hardware", "h100", "--pp", 4, "--tp", 2, "-m", 8, "--effort", 1, "--json")
    data = cli("layout", *flags).data
    assert sum(data["stages"]) == 34
    assert data["stages"][3] < data["stages"][1]
    assert data["gain"] > 0


DATA = Path(__file__).parents[1] / "data" / "primus"


def test_it_tells_causes_and_a_better_order_in_words_json_and_a_picture(cli, tmp_path):
    pytest.importorskip("matplotlib")
    files = ("--plan", "plan.json", "--certificate", "certificate.json", "-o", "both.svg")
    found = cli("whatif", DATA, "--step", 8, "--effort", 1, "--seconds", 1, *files)
    assert found.out.startswith("Primus: recorded on pp=8, 16 microbatches; step 8, of 4 recorded\nmeasured 3245 ms")
    assert "from computations -1.04 %, with 0.804 ms for each message +0.04 %, from all parts +0.00 %" in found.out
    assert "warm-up       28.2 %" in found.out
    assert "stage 7 on rank 7, 1.09 of the mean" in found.out
    assert "split backwards: both halves are taken to be equally long" in found.out
    assert (tmp_path / "both.svg").read_text().startswith("<?xml")
    assert cli("certify", "plan.json", "certificate.json").out.startswith("certified: makespan 3")
    data = cli("whatif", DATA, "--memory-cap", 8, "--effort", 1, "--seconds", 0.2, "--json").data
    assert (data["source"], data["memory_cap"], len(data["waits"])) == ("Primus", [8.0] * 8, 8)
    free = cli("whatif", DATA, "--memory-cap", "inf", "--effort", 1, "--seconds", 0.2, "--json").data
    assert free["memory_cap"] == [None] * 8
    assert data["work"] + sum(cause["share"] for cause in data["causes"]) == pytest.approx(1, abs=0.001)
    assert data["better"]["whole"]["bound"] <= data["better"]["whole"]["makespan"]


PREDICTED = ("predict", "--model", "gpt3", "--hardware", "l4")
TUNED = ("tune", "--model", "gpt3", "--hardware", "l4", "--batch", 8)
SOLVED = ("solve", "--pp", 2, "-m", 4)
CUT = ("layout", "--costs", LAYERS, "--pp", 4, "-m", 8)
RECORDED = ("whatif", DATA)

REFUSED: list[tuple[tuple[object, ...], str]] = [
    (("predict", *flags({**GPT3, "tp": 7})), "gpus=64 cannot be shared out: tp=7 x pp=8 = 56"),
    (("predict", *flags({**GPT3, "tp": "x"})), "--tp: cannot read 'x'; give a whole number"),
    (("predict", *flags({**GPT3, "stages": "1,2"})), "stages"),
    (("predict",), "model is missing"),
    (PREDICTED, "batch is missing"),
    (("predict", "--rows", "rows.json"), "rows.json"),
    (("predict", "job.yaml", "--hardware", "l4"), "there is no file 'job.yaml'"),
    (("predict", "job.yaml", "--rows", "rows.json"), "leave out one"),
    (TUNED, "--gpus is missing"),
    (("tune", "--gpus", 8, "--batch", 8), "model is missing"),
    (("tune", *SMALL, "--tp", 3), "no mesh of 16 GPUs"),
    (("tune", *SMALL, "--zero", 4), "zero = 4"),
    (("tune", *SMALL, "--tp", "1,,2"), "--tp: cannot read '1,,2'"),
    ((*TUNED, "--gpus", "99999999999999"), "gpus is 99999999999999; give a whole number from 1 to 16777216"),
    (("tune", *SMALL, "-o", "tune.pdf"), "tune.pdf: cannot draw this format"),
    (("tune", *FEW, "--explain", "tq=8"), "unknown key 'tq'"),
    (("tune", *FEW, "--explain", "tp"), "cannot read 'tp'"),
    (("tune", *FEW, "--explain", "tp=3"), "tp=3 does not divide"),
    ((*SOLVED, "--recompute", "1,2"), "give none, all, auto"),
    ((*SOLVED, "--memory-cap", 0.5), "the smallest that works: 1"),
    ((*SOLVED, "--memory-cap", "2,x"), "one for each rank: 4,3,3,2"),
    ((*SOLVED, "--objective", "period"), 'give "span" or "makespan"'),
    ((*SOLVED, "-o", "none/plan.json"), "none/plan.json: cannot write the result: No such file"),
    ((*SOLVED, "-o", "plan.json", "--log", "./plan.json"), "give each its own"),
    (("layout",), "give one of --costs, --model and --trace"),
    (CUT[:-2], "-m, that of microbatches"),
    ((*CUT, "--zero", 1), "--zero is for --model"),
    ((*CUT, "--schedule", "zbv"), "chunks"),
    ((*CUT, "--objective", "period"), 'give "span" or "makespan"'),
    ((*CUT, "--seconds", "nan"), "seconds is nan; give a positive number"),
    ((*CUT, "-o", "none/plan.json"), "none/plan.json: cannot write the result"),
    (("layout", "--trace", "nowhere"), "--trace needs the plan"),
    (("layout", "--model", "llama-3-8b", "--hardware", "h100", "--pp", 4), "or -m, the number of microbatches"),
    (("whatif", "nowhere"), "no such directory"),
    ((*RECORDED, "--memory-cap", "all"), "give a number of microbatches, or same"),
    ((*RECORDED, "--memory-cap", 0.5), "the smallest that works: 1"),
    ((*RECORDED, "--step", 3), "step 3 was not recorded"),
    ((*RECORDED, "--recompute", "all"), "recompute is 'all'; give same or auto"),
    ((*RECORDED, "--plan", "none/plan.json"), "none/plan.json: cannot write the result"),
    ((*RECORDED, "--plan", "both", "--certificate", "both"), "--plan and --certificate name one file"),
]


@pytest.mark.parametrize(("command", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_wrong_requests_are_one_clear_error(refused, command: tuple[object, ...], words: str) -> None:
    assert words in refused(2, *command)
