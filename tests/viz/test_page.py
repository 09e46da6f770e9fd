"""Interactive pages: complete in one file, read back as written, small, and built from their sources."""

import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quintsched as qs
from quintsched.viz import compare, render, render_measured
from quintsched.viz.page.plan_page import page_of
from tests.traces import write_trace

from .node import NEEDS_NODE, run_node

PAGE = Path(__file__).parents[2] / "viz" / "page"
BUILT = PAGE / "built.js"
MOST_LINES, MOST_LINES_OF_A_FILE, WIDEST = 4055, 400, 160


def read_page(page: bytes) -> dict[str, Any]:
    return json.loads(run_node("read.mjs", text=page))


def test_a_page_needs_nothing_else(tmp_path: Path) -> None:
    simulation = qs.compile("1f1b", mesh="pp=2", microbatches=3).simulate()
    render(simulation, tmp_path / "a & b.html")
    text = (tmp_path / "a & b.html").read_text("utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "<title>a &amp; b</title>" in text
    assert not re.search(r"https?:|<link|\bimport\(|fetch\(|XMLHttp", text)
    assert text.count("</script>") == 2
    assert page_of(simulation, (), "x") == page_of(simulation, (), "x")


@NEEDS_NODE
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("1f1b", {"mesh": "dp=2,pp=3", "microbatches": 4, "zero": 3}),
        ("zbv", {"mesh": "pp=2", "microbatches": 3}),
        ("dualpipe-v", {"mesh": "pp=2", "microbatches": 4, "overlap": True, "recompute": 1}),
        ("inference", {"mesh": "pp=1", "microbatches": 1}),
    ],
)
def test_a_page_has_the_plan_and_its_times(name: str, options: dict[str, Any]) -> None:
    costs = qs.Costs(unit="ms", forward=3.25, backward_weight=0.1, p2p=0.7, exchange=0.2)
    simulation = qs.compile(name, **options).simulate(costs)
    found = read_page(page_of(simulation, (), name))
    assert qs.Plan.from_json(found["json"]) == simulation.plan
    assert (found["title"], found["sound"]) == (simulation.plan.title, True)
    assert found["peaks"] == pytest.approx(simulation.peak_activations)
    assert found["again"] == simulation.makespan
    (run,) = found["runs"]
    assert (run["unit"], run["makespan"]) == ("ms", simulation.makespan)
    assert (run["start"], run["end"]) == (simulation.start.tolist(), simulation.end.tolist())
    assert run["busy"] == pytest.approx(simulation.busy)
    assert run["bubble"] == pytest.approx(simulation.bubble)


@NEEDS_NODE
def test_a_page_has_the_measured_step_beside_the_plan(tmp_path: Path) -> None:
    costs = qs.Costs(unit="ms", forward=3.0, p2p=0.5)
    simulation = qs.compile("zb-h1", mesh="pp=2", microbatches=3).simulate(costs)
    step = write_trace(tmp_path, simulation, scales=(1.2,)).step()
    render_measured(simulation, [step], tmp_path / "both.html")
    planned, measured = read_page((tmp_path / "both.html").read_bytes())["runs"]
    assert planned["makespan"] == simulation.makespan
    assert measured["name"] == f"measured, step {step.number}"
    assert measured["makespan"] == pytest.approx(step.makespan)
    assert measured["busy"] == pytest.approx(step.busy)


@NEEDS_NODE
def test_a_page_has_several_plans_beside_each_other(tmp_path: Path) -> None:
    simulations = [qs.compile(name, mesh="pp=2", microbatches=3).simulate() for name in ("1f1b", "zb-h1", "gpipe")]
    compare(simulations, tmp_path / "all.html")
    runs = read_page((tmp_path / "all.html").read_bytes())["runs"]
    assert [run["start"] for run in runs] == [one.start.tolist() for one in simulations]
    with pytest.raises(qs.UsageError, match="one unit of time"):
        compare([*simulations, simulations[0].plan.simulate(qs.Costs(unit="s"))], tmp_path / "units.html")


def test_a_hundred_thousand_spans_are_a_small_page() -> None:
    plan = qs.compile("1f1b", mesh="pp=32", microbatches=520)
    drawn = np.random.default_rng(0).uniform(9, 11, (2, 32))
    simulation = plan.simulate(qs.Costs(forward=tuple(drawn[0]), backward_input=tuple(drawn[1]), p2p=0.3))
    assert plan.num_instructions > 97_000
    began = time.process_time()
    page = page_of(simulation, (), "large")
    assert time.process_time() - began < 5
    assert len(page) < 5e6


def test_the_program_keeps_to_its_budget() -> None:
    files = [file for file in PAGE.glob("*.js") if file != BUILT]
    lines = {file.name: file.read_text("utf-8").splitlines() for file in files}
    assert sum(map(len, lines.values())) <= MOST_LINES
    for name, of_file in lines.items():
        assert len(of_file) <= MOST_LINES_OF_A_FILE, name
        assert max(map(len, of_file)) <= WIDEST, name
        assert of_file[0].startswith("/**"), f"{name} opens with what it is"


@pytest.mark.slow
def test_the_built_program_is_that_of_its_sources(tmp_path: Path) -> None:
    makefile = (PAGE.parents[1] / "Makefile").read_text("utf-8")
    (version,) = re.findall(r"esbuild@([\d.]+)", makefile)
    (options,) = re.findall(r"^BUNDLE := (.*)$", makefile, re.MULTILINE)
    if shutil.which("npx") is None:
        pytest.skip("node is not installed")
    esbuild = ["npx", "--yes", f"esbuild@{version}"]
    if subprocess.run([*esbuild, "--version"], capture_output=True, check=False, cwd=tmp_path).returncode:
        pytest.skip(f"esbuild {version} can be had neither here nor from npm")
    command = [*esbuild, str(PAGE / "main.js"), *options.split(), f"--outfile={tmp_path / 'built.js'}"]
    subprocess.run(command, capture_output=True, check=True, cwd=tmp_path)
    assert (tmp_path / "built.js").read_bytes() == BUILT.read_bytes(), "run `make page`"
