"""Traces, parts of plans and reports of stalls on the command line: costs and pictures of them."""

import gzip
import json
import os
import shutil
import time

import pytest

import quintsched as qs
from quintsched.stalls.culprit import find_culprit
from quintsched.stalls.last_reported_rank_states import BlockingCall, Fate, RankState
from tests.traces import COSTS, write_trace


@pytest.fixture
def simulation(plan_file, tmp_path):
    made = qs.Plan.load(plan_file).simulate(COSTS)
    write_trace(tmp_path / "traces", made)
    return made


def test_simulate_takes_costs_from_a_trace(cli, simulation, plan_file):
    data = cli("simulate", plan_file, "--costs", "from-trace", "traces", "--json").data
    assert data["unit"] == "ms"
    assert data["makespan"] == pytest.approx(simulation.makespan, rel=0.001)
    assert "time in ms" in cli("simulate", plan_file, "--costs", "from-trace", "traces").out


def test_factors_of_microbatches_come_from_a_trace(cli, plan_file, tmp_path):
    lengths = (1.0, 2.0, 0.5, 0.5)
    costs = qs.Costs(unit="ms", forward=20.0, backward_input=20.0, backward_weight=20.0, microbatches=lengths)
    write_trace(tmp_path / "traces", qs.Plan.load(plan_file).simulate(costs))
    command = ("simulate", plan_file, "--costs", "from-trace", "traces", "-o", "found.json")
    cli(*command, "--per-microbatch")
    assert qs.Costs.load(tmp_path / "found.json").forward.microbatches == pytest.approx(lengths, abs=0.001)


def test_what_does_not_go_together(refused, simulation, plan_file, tmp_path):
    (tmp_path / "costs.json").write_text('{"microbatches": [1, 2, 0.5]}')
    for command in (("simulate", plan_file), ("show", plan_file), ("compare", "1f1b", "--pp", 4, "-m", 4)):
        said = refused(1, *command, "--costs", "costs.json")
        assert "costs: /microbatches has 3 values, but the plan has 4 microbatches" in said
    for arguments, words in (
        (("--costs", "none.json", "--per-microbatch"), "--per-microbatch goes with --costs from-trace only"),
        (("--costs", "from-trace"), "--costs from-trace DIR"),
        (("traces",), "goes with --costs from-trace only"),
        (("--costs", "from-trace", "nowhere"), "no such directory"),
        (("-o", "no/such/costs.json"), "cannot write the costs"),
    ):
        assert words in refused(2, "simulate", plan_file, *arguments)
    qs.compile("gpipe", mesh="dp=2,pp=2,tp=2", microbatches=4).save(tmp_path / "other.json")
    assert "the trace of another plan\n" in refused(3, "simulate", "other.json", "--costs", "from-trace", "traces")
    shutil.copyfile(plan_file, tmp_path / "traces" / "plan.json")  # as a run leaves it
    said = refused(3, "simulate", "other.json", "--costs", "from-trace", "traces")
    assert "another plan: schedule.name is 1f1b there, but gpipe here; its own is traces/plan.json\n" in said
    (tmp_path / "traces" / "rank5.json").unlink()
    assert "rank5.json is missing" in refused(1, "render", plan_file, "--trace", "traces", "-o", "x.svg")
    assert not (tmp_path / "x.svg").exists()


def test_render_draws_measured_under_planned(cli, simulation, plan_file, tmp_path):
    pytest.importorskip("matplotlib")
    done = cli("render", plan_file, "--trace", "traces", "-o", "both.svg")
    planned, measured = done.out.splitlines()[1:]
    assert planned.startswith(f"planned: makespan {simulation.makespan:g} ms, bubble ")
    assert measured.startswith(f"measured, step 2: makespan {simulation.makespan:g} ms, bubble ")
    assert "measured, step 2" in (tmp_path / "both.svg").read_text()
    data = cli("render", plan_file, "--trace", "traces", "-o", "both.html", "--json").data
    assert data["measured"][0]["makespan"] == pytest.approx(data["makespan"], rel=0.001)


def test_steps_of_a_trace_are_chosen_and_merged_with_a_profile(cli, refused, plan_file, tmp_path):
    write_trace(tmp_path / "traces", qs.Plan.load(plan_file).simulate(COSTS), scales=(1.0, 1.1, 1.2))
    done = cli("render", plan_file, "--trace", "traces", "--steps", "3..9", "-o", "steps.svg")
    assert [line.split(":")[0] for line in done.out.splitlines()[2:]] == ["measured, step 3", "measured, step 4"]
    (tmp_path / "rank1.json").write_text('{"traceEvents": [{"ph": "X", "name": "mm", "pid": 1, "tid": 1, "ts": 0}]}')
    merged = ("render", plan_file, "--trace", "traces", "-o", "all.json.gz", "--profiler")
    cli(*merged, "rank1.json")
    text = gzip.decompress((tmp_path / "all.json.gz").read_bytes()).decode()
    assert '"rank 1, rank1.json: 1"' in text
    assert "not a trace of torch.profiler" in refused(1, *merged, plan_file)
    assert "the trace has 2, 3, 4\n" in refused(2, *merged[:4], "--steps", "7", "-o", "x.json")
    assert "add --trace DIR" in refused(2, "render", plan_file, "--steps", "3", "-o", "x.json")
    assert "events of a measured step" in refused(2, "render", plan_file, "--profiler", "rank1.json", "-o", "x.json")


@pytest.fixture
def long_plan(cli, tmp_path):
    cli("compile", "--schedule", "1f1b", "--mesh", "pp=4", "--microbatches", "8", "-o", "plan.json")
    return "plan.json"


def test_show_prints_the_part_that_is_asked_for(cli, long_plan):
    done = cli("show", long_plan, "--ranks", "1..2", "--time", "0..5")
    assert [line.split()[:4] for line in done.out.splitlines()[1:]] == [
        ["rank", "1", ".", "F0"],
        ["rank", "2", ".", "."],
    ]
    assert "ranks 1 to 2 of 4, time 0 to 5 of 33" in done.err
    assert cli("show", long_plan).err == ""
    assert len(cli("show", long_plan, "--ranks", "3", "--json").data["grid"]) == 1


def test_a_large_picture_is_an_overview_and_says_so(cli, tmp_path):
    pytest.importorskip("matplotlib")
    cli("compile", "--schedule", "1f1b", "--mesh", "pp=2", "--microbatches", "130", "-o", "large.json")
    assert "an overview" in cli("render", "large.json", "-o", "large.png").err
    assert cli("render", "large.json", "-o", "part.png", "--time", "10..40").err == ""
    assert json.loads((tmp_path / "large.json").read_text())["format"] == "quintsched.plan"


def test_a_plan_that_is_not_sound_gets_a_page_with_its_counter_example(refused, long_plan, tmp_path):
    plan = json.loads((tmp_path / long_plan).read_text())
    plan["programs"][0].pop(0)
    (tmp_path / "broken.json").write_text(json.dumps(plan))
    said = refused(1, "render", "broken.json", "-o", "broken.html")
    assert "rank 0 runs Fwd(stage=0, microbatch=0) 0 times" in said
    assert "broken.html shows it" in said
    assert (tmp_path / "broken.html").exists()


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
