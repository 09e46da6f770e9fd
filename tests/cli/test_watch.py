"""`quintsched watch` and `report`: a run is followed to its end, and what is said and drawn of logs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import quintsched as qs
from quintsched.cli.run_commands import run_end
from quintsched.cli.run_commands import watch as module
from quintsched.cli.run_commands.run_view import curve, stragglers, view_of
from quintsched.formats.run_plan import save_beside
from quintsched.trace.training_log import TrainingLog
from tests.traces import write_trace

from ..helpers.run_logs import END, START, step, write_log

WRITER = """
import fcntl, sys
log = open("log.jsonl", "a")
fcntl.lockf(log, fcntl.LOCK_EX)
print("locked", flush=True)
for line in sys.stdin:
    log.write(line)
    log.flush()
"""

RANKS = {"rank_busy": [0.6, 0.62, 0.6, 0.9], "rank_memory_gb": [1.0, 1.0, 1.0, 2.0]}
LOG = Path("log.jsonl")


def test_a_run_that_goes_on_is_followed_to_its_end(cli, tmp_path, monkeypatch):
    left = [step(20, loss=None, **RANKS), {"event": "evaluation", "step": 20, "validation_loss": 2.5}, END]
    write_log(LOG, START, step(10, **RANKS))

    def sleep(_: float) -> None:
        with LOG.open("a") as log:
            log.write(json.dumps(left.pop(0)) + "\n")

    monkeypatch.setattr(module.time, "sleep", sleep)
    done = cli("watch", ".")
    late = "planned bubble 25.0%  rank 3 computes 1.48 times the median"
    assert done.out.splitlines() == [
        f"{tmp_path.name}: 1f1b on pp=4, 8 microbatches",
        f"step 10/40  loss 3.0000  grad norm 1  lr 0.1  8 samples/s  2.00 GB  bubble 30.0%  left 15.0 s  {late}",
        f"step 20/40  loss nan  grad norm 1  lr 0.1  8 samples/s  2.00 GB  bubble 30.0%  left 10.0 s  {late}",
        "step 20  validation loss 2.5000",
        "ended: as configured",
    ]
    (found,) = map(json.loads, cli("watch", "log.jsonl", "--json").out.splitlines())
    assert (found["step"], found["ended"], found["planned_bubble"]) == (40, "as configured", 0.25)


@pytest.mark.skipif(sys.platform == "win32", reason="logs are not locked there")
def test_a_killed_run_is_known_by_its_log_that_nobody_holds(cli, monkeypatch):
    monkeypatch.setattr(run_end, "QUIET_S", 0.0)
    monkeypatch.setattr(run_end, "QUIET_RECORDS", 0)
    monkeypatch.setattr(module, "POLL_S", 0.05)
    writer = subprocess.Popen([sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with writer:
        assert writer.stdout.readline() == "locked\n"
        writer.stdin.write(json.dumps(START) + "\n")
        writer.stdin.flush()
        polls = []

        def sleep(_: float) -> None:
            polls.append(1)
            if len(polls) == 3:
                writer.kill()
                writer.wait()

        while not Path("log.jsonl").read_text():
            pass
        monkeypatch.setattr(module.time, "sleep", sleep)
        done = cli("watch", ".", code=4)
    assert len(polls) == 3
    assert done.err == "error: log.jsonl: the log has no end: the run was killed, or writes it no longer\n"


def test_the_view_fits_its_terminal_and_names_who_straggles():
    log = TrainingLog(Path("run/log.jsonl"), (START, *(step(number, **RANKS) for number in (10, 20, 30))))
    lines = [*view_of(log, log.summary(), 80, 24)]
    assert lines[:2] == ["run: 1f1b on pp=4, 8 microbatches", "step 30/40, left 5.0 s"]
    assert lines[2] == "loss      1.0000  █▅▁"
    assert lines[3:5] == ["speed     8 samples/s", "bubble    30.0%, planned 25.0%"]
    assert lines[5] == f"rank   0  {'█' * 14}{'░' * 10}  60%  1.00 GB"
    assert lines[8] == f"rank   3  {'█' * 22}{'░' * 2}  90%  2.00 GB  1.48 times the median rank"
    small = [*view_of(log, log.summary(), 80, 9)]
    assert small[5:] == ["the 1 of 4 ranks that compute most:", lines[8]]
    assert stragglers(step(10, rank_busy=[])) == {}
    assert curve([], 8) == ""


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("", "no record of a run"),
        ('{"event": "st', "no record of a run"),
        ('{"event": "step", "step": 1, "loss": "high"}\n', "line 1: /loss: a number is needed"),
        ('{"event": "step", "loss": 1}\n', "line 1: /step: a whole number is needed"),
        ('{"loss": 1}\n{}\n', "line 1: not a record of a run"),
        (f"{json.dumps(START)}\n{{,}}\n{json.dumps(END)}", "line 2: not JSON"),
    ],
)
def test_a_log_that_is_none_is_refused_with_the_line(refused, lines, says):
    LOG.write_text(lines)
    assert says in refused(1, "watch", ".")


def test_where_no_log_is_its_name_is_asked_for(refused, tmp_path):
    assert "no log (*.jsonl) in this folder" in refused(2, "report", ".")
    assert "cannot read the log" in refused(2, "watch", "missing.jsonl")
    assert "which its log.path says" in refused(2, "watch", "job.yaml")
    for name in ("a.jsonl", "b.jsonl"):
        write_log(tmp_path / name, START)
    assert "name one of its logs: a.jsonl, b.jsonl" in refused(2, "watch", ".")


def test_runs_are_reported_and_drawn_side_by_side(cli, tmp_path):
    epoch = {"event": "epoch", "epoch": 1, "step": 6, "loss": 3.0, "validation_loss": 2.5}
    write_log(tmp_path / "one" / "log.jsonl", START, step(2), step(4, loss=3.5), epoch, END)
    write_log(tmp_path / "two" / "log.jsonl", START, step(2), step(4, loss=None), tail='{"event": "st')
    done = cli("report", "one", "two", "-o", "curves.svg")
    assert done.out.splitlines() == [
        "one: 1f1b on pp=4, 8 microbatches",
        "  step 40: loss 3.5000, best validation 2.5000",
        "  0.5 s a step, 8 samples/s, 2 GB on the fullest rank",
        "  bubble 30.0 % (planned 25.0 %)",
        "  ended: as configured",
        "",
        "two: 1f1b on pp=4, 8 microbatches",
        "  step 4: loss not finite",
        "  0.5 s a step, 8 samples/s, 2 GB on the fullest rank",
        "  bubble 30.0 % (planned 25.0 %)",
        "  ended: not yet",
    ]
    os.utime(tmp_path / "two" / "log.jsonl", (0, 0))  # and nobody has it open
    assert "ended: the log has no end: the run was killed" in cli("report", "two").out
    drawn = (tmp_path / "curves.svg").read_text()
    assert all(f'id="{name}"' in drawn for name in ("loss 0", "loss 1", "validation 0", "bubble 0", "memory_gb 1"))


def test_the_page_of_a_run_has_its_steps_beside_the_plan(cli, refused, tmp_path):
    ranks = {"rank_busy": [0.5, 0.75], "rank_memory_gb": [1.0, 1.5]}
    environment = {"torch": "2.13", "device": "cpu, 2 cores"}
    run, start = tmp_path / "run", START | {"environment": environment}
    write_log(run / "log.jsonl", start, step(2, **ranks), step(4, loss=None, **ranks))
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=4)
    write_trace(run / "traces", plan.simulate(qs.Costs(unit="ms", forward=10.0)), scales=(1.0, 1.1))
    assert "no plan of a run" in refused(1, "report", "run", "-o", "run.html")
    save_beside(plan, run / "traces")
    cli("report", "run", "-o", "run.html")
    page = (tmp_path / "run.html").read_text()
    assert [*re.findall(r"<h2>([^<]*)</h2>", page)] == [
        "run",
        "curves",
        "run: ranks",
        "run: environment",
        "planned beside measured",
        "the step of median length",
        "where the time goes, under the measured costs",
        "the plan: click on idle time to ask why",
        "proof",
    ]
    assert "<td>1</td><td>75.0%</td><td>1.50</td>" in page
    assert "<th>device</th><td>cpu, 2 cores</td>" in page
    assert '<iframe title="1f1b on pp=2, 4 microbatches" srcdoc="&lt;!DOCTYPE html&gt;' in page
    assert "not finite" in page
    assert not re.search(r'(?:src|href)="http', page)
