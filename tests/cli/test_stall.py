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
    assert "--stall is drawn alone" in refused(2, "render", tmp_path / "plan.json", "--stall", report)
    assert "render needs a plan and -o PICTURE" in refused(2, "render", tmp_path / "plan.json")
    assert "render needs a plan and -o PICTURE" in refused(2, "render", "-o", tmp_path / "x.png")
    assert "cannot draw this format" in refused(2, "render", "--stall", report, "-o", tmp_path / "x.json")
    assert "none.json" in refused(2, "render", "--stall", tmp_path / "none.json")
    assert "/format" in refused(1, "render", "--stall", tmp_path / "plan.json", "-o", tmp_path / "x.png")
    link = tmp_path / "link.png"
    link.symlink_to(report)
    assert "the command reads this file" in refused(2, "render", "--stall", report, "-o", link)
