"""`quintsched predict` and `tune`: by flags, from rows, from a job; one clear error for nonsense."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import quintsched as qs
from quintsched.strategies.commands.flags import option_of

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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tp": 7}, "gpus=64 cannot be shared out: tp=7 x pp=8 = 56"),
        ({"tp": "x"}, "--tp: cannot read 'x'; give a whole number"),
        ({"stages": "1,2"}, "stages"),
    ],
)
def test_nonsense_is_one_clear_error(refused, change: dict[str, Any], words: str) -> None:
    assert words in refused(2, "predict", *flags({**GPT3, **change}))


def test_a_flag_that_is_missing_is_named(refused) -> None:
    assert "model is missing" in refused(2, "predict")
    assert "batch is missing" in refused(2, "predict", "--model", "gpt3", "--hardware", "l4")


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


def test_files_that_are_not_there(refused) -> None:
    assert "rows.json" in refused(2, "predict", "--rows", "rows.json")
    assert "there is no file 'job.yaml'" in refused(2, "predict", "job.yaml", "--hardware", "l4")
    assert "leave out one" in refused(2, "predict", "job.yaml", "--rows", "rows.json")


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
    assert cli("predict", "plan.json", job, "--hardware", "l4").code == 3
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


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--tp", "3"), "no mesh of 16 GPUs"),
        (("--zero", "4"), "zero = 4"),
        (("--tp", "1,,2"), "--tp: cannot read '1,,2'"),
        (("--gpus", "99999999999999"), "gpus is 99999999999999; give a whole number from 1 to 16777216"),
        (("-o", "tune.pdf"), "tune.pdf: cannot draw this format"),
    ],
)
def test_searches_that_cannot_be(refused, more: tuple[str, ...], words: str) -> None:
    assert words in refused(2, "tune", *SMALL, *more)


def test_what_a_search_needs(refused) -> None:
    assert "--gpus is missing" in refused(2, "tune", "--model", "gpt3", "--hardware", "l4", "--batch", "8")
    assert "model is missing" in refused(2, "tune", "--gpus", "8", "--batch", "8")


ONE = ("--cp", "1", "--zero", "0", "--schedule", "1f1b", "--recompute", "full")


def test_where_nothing_fits_the_exit_code_says_so(refused) -> None:
    words = refused(3, "tune", "--model", "gpt3-175b", "--hardware", "l4", "--gpus", "8", "--batch", "8", *ONE)
    assert "fits" in words


def test_why_another_strategy_lost(cli, refused) -> None:
    lines = cli("tune", *FEW, "--explain", "tp=8,microbatch=1").out.splitlines()
    assert any(" slower than the best: " in line for line in lines)
    data = cli("tune", *FEW, "--explain", "tp=1,pp=1,recompute=none,zero=0", "--json").data["explanation"]
    assert data["fits"] is False
    assert data["reason"][0].startswith("judged: ")
    assert "does not fit" in data["reason"][1]
    assert "smallest change" in data["reason"][2]
    for text, words in {"tq=8": "unknown key 'tq'", "tp": "cannot read 'tp'", "tp=3": "tp=3 does not divide"}.items():
        assert words in refused(2, "tune", *FEW, "--explain", text)


def test_the_best_is_written_as_plan_and_job(cli, tmp_path) -> None:
    found = cli("tune", *FEW, "--emit", tmp_path / "best", "--json").data
    plan = qs.Plan.load(found["files"]["plan"])
    assert plan.check().sound
    assert plan.mesh.size == 16
    assert found["files"]["job"] == str(tmp_path / "best" / "job.yaml")
    assert "run it: quintsched run" in cli("tune", *FEW, "--emit", tmp_path / "best").out
