"""`quintsched report`: what it says of logs, and what it draws of them."""

import json
import os
import re
from pathlib import Path

import pytest

import quintsched as qs
from quintsched.formats.run_plan import save_beside
from quintsched.trace.training_log import TrainingLog
from tests.traces import write_trace

START = {"event": "start", "plan": "1f1b on pp=2, 4 microbatches", "step": 0, "deferred_share": None}
END = {"event": "end", "step": 6, "seconds": 9.0, "best": 2.5, "bubble": 0.25, "planned_bubble": 0.2}


def step(number, loss, **more):
    figures = {"samples_per_s": 8.0, "step_s": 0.5, "bubble": 0.3, "memory_gb": 1.5, "lr": 0.1, "grad_norm": 1.0}
    return {"event": "step", "step": number, "epoch": 1, "loss": loss, **figures, **more}


def epoch(number, loss):
    return {"event": "epoch", "epoch": 1, "step": number, "loss": 3.0, "validation_loss": loss}


def write(folder: Path, *records, name="log.jsonl", tail="") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return folder


def test_runs_are_reported_and_drawn_side_by_side(cli, tmp_path):
    write(tmp_path / "one", START, step(2, 4.0), step(4, 3.5), epoch(6, 2.5), END)
    write(tmp_path / "two", START, step(2, 4.1), step(4, None), tail='{"event": "st')
    done = cli("report", "one", "two", "-o", "curves.svg")
    assert done.code == 0
    assert done.out.splitlines() == [
        "one: 1f1b on pp=2, 4 microbatches",
        "  step 6: loss 3.5000, best validation 2.5000",
        "  0.5 s a step, 8 samples/s, 1.5 GB on the fullest rank",
        "  bubble 30.0 % (planned 20.0 %)",
        "  ended: as configured",
        "",
        "two: 1f1b on pp=2, 4 microbatches",
        "  step 4: loss not finite",
        "  0.5 s a step, 8 samples/s, 1.5 GB on the fullest rank",
        "  bubble 30.0 %",
        "  ended: not yet",
    ]
    os.utime(tmp_path / "two" / "log.jsonl", (0, 0))  # and nobody has it open
    assert "ended: the log has no end: the run was killed" in cli("report", "two").out
    drawn = (tmp_path / "curves.svg").read_text()
    assert all(f'id="{name}"' in drawn for name in ("loss 0", "loss 1", "validation 0", "bubble 0", "memory_gb 1"))


def test_the_page_of_a_run_has_its_steps_beside_the_plan(cli, refused, tmp_path):
    ranks = {"rank_busy": [0.5, 0.75], "rank_memory_gb": [1.0, 1.5]}
    environment = {"torch": "2.13", "device": "cpu, 2 cores"}
    run = write(tmp_path / "run", START | {"environment": environment}, step(2, 4.0, **ranks), step(4, None, **ranks))
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=4)
    write_trace(run / "traces", plan.simulate(qs.Costs(unit="ms", forward=10.0)), scales=(1.0, 1.1))
    assert "no plan of a run" in refused(1, "report", "run", "-o", "run.html")
    save_beside(plan, run / "traces")
    assert cli("report", "run", "-o", "run.html").code == 0
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


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("log.jsonl", "", "no record of a run"),
        ("log.jsonl", '{"event": "step", "loss": 1}\n', "line 1: /step: a whole number is needed"),
        ("log.jsonl", '{"loss": 1}\n{}\n', "line 1: not a record of a run"),
        ("log.jsonl", json.dumps(START) + "\n{,}\n" + json.dumps(END), "line 2: not JSON"),
    ],
)
def test_a_log_that_is_none_is_refused_with_the_line(tmp_path, name, text, says):
    (tmp_path / name).write_text(text)
    with pytest.raises(qs.InputError, match=says):
        TrainingLog.load(tmp_path)


def test_a_folder_without_one_log_asks_for_its_name(tmp_path):
    with pytest.raises(qs.UsageError, match="no log"):
        TrainingLog.load(tmp_path)
    write(tmp_path, START, name="a.jsonl")
    write(tmp_path, START, name="b.jsonl")
    with pytest.raises(qs.UsageError, match=r"name one of its logs: a.jsonl, b.jsonl"):
        TrainingLog.load(tmp_path)
