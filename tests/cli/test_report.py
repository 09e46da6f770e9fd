"""`quintsched report`: what it says of logs, and what it draws of them."""

import os
import re

import quintsched as qs
from quintsched.formats.run_plan import save_beside
from tests.traces import write_trace

from ..helpers.run_logs import END, START, step, write_log


def test_runs_are_reported_and_drawn_side_by_side(cli, tmp_path):
    epoch = {"event": "epoch", "epoch": 1, "step": 6, "loss": 3.0, "validation_loss": 2.5}
    write_log(tmp_path / "one" / "log.jsonl", START, step(2), step(4, loss=3.5), epoch, END)
    write_log(tmp_path / "two" / "log.jsonl", START, step(2), step(4, loss=None), tail='{"event": "st')
    done = cli("report", "one", "two", "-o", "curves.svg")
    assert done.code == 0
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
