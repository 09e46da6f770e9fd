"""`quintsched render --stall`: the report of a stall as a picture and in words."""

import os
import time

import pytest

import quintsched as qs
from quintsched.stalls.culprit import find_culprit
from quintsched.stalls.last_reported_rank_states import BlockingCall, Fate, RankState


@pytest.fixture
def report(tmp_path):
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=4)
    states = [
        RankState(0, "a", 7, "step", 3, "train", 4, 5.0, 0.1, None, BlockingCall("receive", 4), 3),
        RankState(1, "a", 8, "step", 3, "train", 1, 5.0, 0.1, Fate("signal", 9), BlockingCall("nothing"), 3),
    ]
    path = tmp_path / "stall.json"
    find_culprit(plan, states).save(path)
    plan.save(tmp_path / "plan.json")
    return path


def test_a_report_is_drawn_beside_itself(cli, report):
    done = cli("render", "--stall", report)
    assert done.code == 0, done.err
    assert "rank 1 (host a, pp=1) was killed by SIGKILL in step 3 at instruction 1 of" in done.out
    assert report.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_report_of_a_run_without_an_end_repeats_the_verdict(cli, report):
    log = report.parent / "log.jsonl"
    log.write_text('{"event": "start", "plan": "1f1b on pp=2", "step": 0}\n')
    os.utime(report)  # the run stalls after its last record
    done = cli("report", report.parent)
    assert "ended: " in done.out
    assert "rank 1 (host a, pp=1) was killed by SIGKILL in step 3 at instruction 1 of" in done.out
    os.utime(log, (time.time() + 60,) * 2)  # a new run of the same folder goes on
    assert "ended: not yet" in cli("report", report.parent).out


def test_what_does_not_belong_to_a_report_is_refused(refused, report, tmp_path):
    (tmp_path / "link.png").symlink_to(report)
    for code, arguments, words in (
        (2, ("plan.json", "--stall", report), "--stall is drawn alone"),
        (2, ("plan.json",), "render needs a plan and -o PICTURE"),
        (2, ("-o", "x.png"), "render needs a plan and -o PICTURE"),
        (2, ("--stall", report, "-o", "x.json"), "cannot draw this format"),
        (2, ("--stall", "none.json"), "none.json"),
        (1, ("--stall", "plan.json", "-o", "x.png"), "/format"),
        (2, ("--stall", report, "-o", "link.png"), "the command reads this file"),
    ):
        assert words in refused(code, "render", *arguments)
