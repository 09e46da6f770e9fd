"""Runs that tune themselves: the numbers are those of the run that never switched, and a slower plan is given up."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from quintsched.compiler import compile_request
from quintsched.plan import Plan
from quintsched.runtime import JobConfig, Transport, run_local
from quintsched.runtime.launch.job_plan import plan_of, request_of
from quintsched.runtime.launch.tune_while_training import Autotune, Proposal, Propose, step_s
from quintsched.trace.measured_trace import Trace
from tests.helpers.jobs import COUNTING, Sections, fit, joined, launch

JOB: Sections = {
    "model": {"name": "gpt", "options": {"hidden": 8, "depth": 2, "heads": 2, "tied": True, "dropout": 0.1}},
    "data": {"name": "counting.py:load"},
    "parallel": {"mesh": "dp=2,pp=2", "microbatches": 2, "schedule": "1f1b", "zero": 1},
    "train": {"epochs": 3, "batch_size": 8, "optimizer": {"name": "adam", "lr": 3e-3}, "clip": 1.0},
    "runtime": {"precision": "float64"},
    "log": {"path": "log.jsonl", "every": 1},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "counting.py").write_text(COUNTING)
    return tmp_path


def job(*sections: Sections) -> JobConfig:
    return JobConfig.model_validate(joined(JOB, *sections))


def losses(path: str = "log.jsonl") -> list[float]:
    """Return the loss of each step, and that of each validation."""
    records = map(json.loads, Path(path).read_text().splitlines())
    return [r.get("validation_loss", r.get("loss")) for r in records if r["event"] in ("step", "epoch")]


def tuned(config: JobConfig, propose: Propose) -> list[float]:
    Path("log.jsonl").unlink(missing_ok=True)
    plan = plan_of(config)

    def run(transport: Transport) -> None:
        Autotune(config, plan, transport, propose).tune_and_train("new")

    run_local(plan.mesh.size, run)
    return losses()


def switching(config: JobConfig, changed: dict[str, object], *, keeps: bool) -> tuple[Propose, list[Plan]]:
    """Return a function that proposes a plan with changed settings, and the plans that it has been asked about."""
    asked: list[Plan] = []

    def propose(plan: Plan, trace: Trace, held: Sequence[int], blocks: Sequence[float]) -> Proposal:
        asked.append(plan)
        assert sum(held) == len(blocks)
        assert min(blocks) > 0
        assert step_s(trace) > 0
        better = compile_request(replace(request_of(config), **changed))  # type: ignore[arg-type]
        return Proposal(better, 1e9 if keeps else 1e-9, 1.0)

    return propose, asked


@pytest.mark.parametrize(
    ("sections", "changed", "keeps"),
    [
        ({"parallel": {"mesh": "pp=2", "zero": 0}}, {"stages": (1, 3), "schedule": "gpipe"}, True),
        pytest.param({"parallel": {"zero": 3}}, {"stages": (3, 1), "schedule": "zb-h1"}, False, marks=pytest.mark.slow),
    ],
)
def test_the_numbers_are_those_of_the_run_that_never_switched(
    sections: Sections, changed: dict[str, object], keeps: bool
) -> None:
    fit(job(sections))
    expected = losses()
    config = job(sections, {"checkpoint": {"dir": "saved"}})
    propose, asked = switching(config, changed, keeps=keeps)
    found = tuned(config, propose)
    assert len(asked) == 1
    assert found == pytest.approx(expected, rel=1e-12, abs=0)
    assert {path.name for path in Path("saved-autotune").iterdir()} == {"before", "after"}
    last = Plan.load(Path("saved") / "plan.json")
    assert (last.blocks_per_stage == changed["stages"]) == keeps


def test_wrong_requests(capsys: pytest.CaptureFixture[str]) -> None:
    saved: Sections = {"checkpoint": {"dir": "saved"}, "log": {"path": None}}
    plan_of(job()).save("plan.json")
    for sections, more, why in (
        ({"log": {"path": None}}, (), "set checkpoint.dir"),
        ({**saved, "checkpoint": {"dir": "memory://runs/1"}}, (), "set checkpoint.dir to one"),
        ({**saved, "train": {"max_steps": 9}}, (), "--autotune measures 20 steps; the training has 9"),
        ({**saved, "runtime": {"trace": "traces"}}, (), "leave the trace out"),
        (saved, ("plan.json",), "leave the plan file out"),
    ):
        assert launch(JOB, sections, arguments=("--autotune", *more)) == 2
        assert why in capsys.readouterr().err
