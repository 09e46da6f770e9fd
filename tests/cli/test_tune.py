"""`quintsched tune`: the table, the reason, the front; it finds what trying everything finds."""

from itertools import pairwise

import pytest

import quintsched as qs

SMALL = ("--model", "llama-2-7b", "--hardware", "a100-80gb", "--gpus", "16", "--batch", "64", "--seq", "2048")
FEW = (*SMALL, "--cp", "1", "--zero", "0,1", "--schedule", "1f1b", "--recompute", "none,full", "--microbatch", "1,2")


def test_the_best_come_first(cli) -> None:
    found = cli("tune", *SMALL, "--json").data
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
def test_nonsense_is_one_clear_error(refused, more: tuple[str, ...], words: str) -> None:
    assert words in refused(2, "tune", *SMALL, *more)


def test_what_a_search_needs(refused) -> None:
    assert "--gpus is missing" in refused(2, "tune", "--model", "gpt3", "--hardware", "l4", "--batch", "8")
    assert "model is missing" in refused(2, "tune", "--gpus", "8", "--batch", "8")


def test_where_nothing_fits_the_exit_code_says_so(refused) -> None:
    words = refused(3, "tune", "--model", "gpt3-175b", "--hardware", "l4", "--gpus", "8", "--batch", "8")
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
