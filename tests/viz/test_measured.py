"""Pictures and events of traces: a measured step under its plan, waits apart from run time."""

import re
from pathlib import Path

import pytest

import quintsched as qs
from quintsched.ir.instruction_set import OptStep, Recv
from quintsched.trace.measured_trace import MeasuredStep
from quintsched.viz import render_measured
from quintsched.viz.draw_timeline import draw_measured
from quintsched.viz.house_style import house_style
from quintsched.viz.timeline_objects import stage_scene
from tests.traces import write_trace

from .pictures import count_drawn, read_svg, require_readable, texts_of

COSTS = qs.Costs(unit="ms", forward=10.0, backward_input=9.0, backward_weight=8.0, p2p=0.5, optimizer=4.0, clip=2.0)


def measured(
    directory: Path, name: str = "1f1b", mesh: str = "pp=3", **how: bool
) -> tuple[qs.Simulation, MeasuredStep]:
    simulation = qs.compile(name, mesh=mesh, microbatches=4, **how).simulate(COSTS)
    return simulation, write_trace(directory, simulation, scales=(1.2,)).step()


def test_waits_end_where_their_computation_runs(tmp_path: Path) -> None:
    simulation, step = measured(tmp_path)
    planned, scene = stage_scene(simulation), stage_scene(step)
    assert not planned.waits
    assert [box.instruction for box in scene.boxes] == [box.instruction for box in planned.boxes]
    for box, other in zip(scene.boxes, planned.boxes, strict=True):
        assert (box.start, box.end) == pytest.approx((1.2 * other.start, 1.2 * other.end), abs=0.01)
    starts = {(box.rank, box.start) for box in scene.boxes} | {(bar.rank, bar.start) for bar in scene.bars}
    assert scene.waits
    assert {(wait.rank, wait.end) for wait in scene.waits} <= starts
    waited = sum(wait.end - wait.start for wait in scene.waits)
    spans = [span for row in step.timeline for span in row if not isinstance(span.instruction, Recv)]
    assert waited == pytest.approx(sum(span.wait for span in spans))
    for one in (planned, scene):
        steps = [bar for bar in one.bars if bar.what is OptStep]
        assert [bar.rank for bar in steps] == [0, 1, 2]
        assert max(bar.end for bar in steps) == pytest.approx(one.makespan)


@pytest.mark.parametrize(("name", "overlap"), [("zb-h1", False), ("dualpipe-v", True)])
def test_the_picture_shows_both_with_their_figures(tmp_path: Path, name: str, overlap: bool) -> None:
    simulation, step = measured(tmp_path, name, overlap=overlap)
    render_measured(simulation, [step], tmp_path / "both.svg")
    root = read_svg(tmp_path / "both.svg")
    texts = texts_of(root)
    assert {"planned", "measured, step 2", "waiting", "idle", "time (ms)", simulation.plan.title} <= {*texts}
    for run in (simulation, step):
        figures = f"makespan {run.makespan:.4g} ms · bubble {100 * run.bubble:.1f} % of all ranks' time"
        assert figures in texts
    assert re.search(r"the step took 20\.\d % longer than planned", "\n".join(texts))
    computations = sum(len(i.sides) for program in step.plan.programs for i in program if i.computes)
    assert count_drawn(root, "computations") == 2 * computations
    assert count_drawn(root, "waits") == len(stage_scene(step).waits)


def test_nothing_is_cut_off_and_no_text_hides_another(tmp_path: Path) -> None:
    simulation, step = measured(tmp_path, mesh="dp=2,pp=8")
    with house_style():
        require_readable(draw_measured(simulation, [step]))


def test_times_in_different_units_are_not_drawn_together(tmp_path: Path) -> None:
    simulation, step = measured(tmp_path)
    with pytest.raises(qs.UsageError, match="in forward, those of the step in ms"):
        render_measured(simulation.plan.simulate(), [step], tmp_path / "two.png")
