"""Pictures of plans, measured steps, stalls and searches: all is in them, nothing is cut off or on something else."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.transforms import Bbox

import quintsched as qs
from quintsched.ir.instruction_set import Compute, OptStep, Recv, Send
from quintsched.simulation.time_grid import time_grid
from quintsched.simulation.time_window import TimeWindow
from quintsched.stalls.culprit import find_culprit
from quintsched.stalls.last_reported_rank_states import BlockingCall, Fate, RankState
from quintsched.stalls.stall_report import StallReport
from quintsched.viz import compare, render, render_measured
from quintsched.viz.draw_timeline import draw_comparison, draw_measured, draw_plan
from quintsched.viz.figure_sheet import PNG_DPI, Sheet
from quintsched.viz.frontier import draw_tuning
from quintsched.viz.house_style import house_style, number
from quintsched.viz.runs.stall_picture import BLAME, draw_stall
from quintsched.viz.timeline_objects import stage_scene
from quintsched.viz.timeline_window import scene_within
from tests.helpers.refusals import require_refusals
from tests.traces import measured

MEASURED = qs.Costs(unit="ms", forward=18.5, backward_input=18.1, backward_weight=9.3, p2p=0.6)


def simulate(name: str, pp: int, microbatches: int, chunks=None, costs=None, *, overlap=False) -> qs.Simulation:
    sizes = {"mesh": f"dp=2,pp={pp}", "microbatches": microbatches, "chunks": chunks}
    return qs.compile(name, **sizes, overlap=overlap).simulate(costs)


PAIRED = ("dualpipe-v", "interleaved-1f1b", "dualpipe")


@st.composite
def simulations(draw: st.DrawFn, most_ranks: int = 4) -> qs.Simulation:
    name = draw(st.sampled_from(["1f1b", "gpipe", "inference", *PAIRED]))
    both_ways, interleaved = name == "dualpipe", name == "interleaved-1f1b"
    pp = draw(st.sampled_from([2, 4])) if both_ways else draw(st.integers(1, most_ranks))
    microbatches = pp * draw(st.integers(1 + both_ways, 2)) if both_ways or interleaved else draw(st.integers(1, 6))
    chunks = draw(st.integers(2, 3)) if interleaved else None
    overlap = name in PAIRED and draw(st.booleans())
    return simulate(name, pp, microbatches, chunks, draw(st.sampled_from([None, MEASURED])), overlap=overlap)


def test_svg_says_what_the_plan_is(tmp_path: Path) -> None:
    simulation = simulate("1f1b", 4, 8, costs=MEASURED)
    render(simulation, tmp_path / "plan.svg")
    texts = texts_of(read_svg(tmp_path / "plan.svg"))
    assert simulation.plan.title in texts
    assert f"makespan {number(simulation.makespan)} ms" in "\n".join(texts)
    assert f"bubble {100 * simulation.bubble:.1f} % of all ranks' time" in "\n".join(texts)
    assert f"span bubble {100 * simulation.span_bubble:.1f} % of the longest rank's span" in "\n".join(texts)
    assert {"time (ms)", "forward", "backward", "idle", "optimizer step", *(f"rank {r}" for r in range(4))} <= {*texts}


@settings(max_examples=5, deadline=None)
@given(simulations())
def test_every_computation_and_message_is_drawn(tmp_path_factory, simulation: qs.Simulation) -> None:
    path = tmp_path_factory.mktemp("svg") / "plan.svg"
    render(simulation, path)
    root = read_svg(path)
    instructions = [i for program in simulation.plan.programs for i in program]
    computations = [side for i in instructions for side in i.sides if isinstance(side, Compute)]
    assert count_drawn(root, "computations") == len(computations)
    assert count_drawn(root, "messages") == sum(isinstance(i, Send) for i in instructions)
    written = Counter(text for text in texts_of(root) if text.isdecimal())
    assert not Counter(str(i.microbatch) for i in computations) - written


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "simulated",
    [
        [("1f1b", 1, 2)],
        [("inference", 4, 8, 2)],
        [("gpipe", 8, 12, None, MEASURED)],
        [("interleaved-1f1b", 2, 4, 12)],
        [("1f1b", 40, 3)],
        [("gpipe", 4, 8), ("1f1b", 4, 8), ("interleaved-1f1b", 2, 8, 2)],
        [("gpipe", 2, 2, None, qs.Costs(unit="ticks of the very slow clock $_{on}$ the\x00wall" * 2))] * 2,
        [("1f1b", 2, 2, None, qs.Costs(forward=0, backward_input=0, backward_weight=0))],
        [("dualpipe-v", 4, 12, 2, qs.Costs(exchange=0.5)), ("dualpipe", 4, 12)],
    ],
)
def test_nothing_is_cut_off_and_no_text_hides_another(simulated: list[tuple[str, int, int]]) -> None:
    drawn = [simulate(*arguments, overlap=arguments[0] in PAIRED) for arguments in simulated]
    with house_style():
        require_readable(draw_plan(drawn[0]) if len(drawn) == 1 else draw_comparison(drawn))


def test_pictures_that_cannot_be_are_refused(tmp_path: Path) -> None:
    simulation, folder = simulate("1f1b", 2, 2), tmp_path / "folder.png"
    folder.mkdir()
    for name in ("plan.pdf", "plan", "plan.png.gz", ".svg"):
        for draw in (lambda path: render(simulation, path), lambda path: compare([simulation], path)):
            with pytest.raises(qs.UsageError, match=re.escape("end the name in .png, .svg or .html")):
                draw(tmp_path / name)
    for path in (tmp_path / "missing" / "plan.svg", folder):
        with pytest.raises(qs.UsageError, match="cannot write the picture"):
            render(simulation, path)
    assert list(tmp_path.iterdir()) == [folder]
    planned, step = simulated(4, 3), measured(tmp_path)[1]
    milliseconds = simulate("1f1b", 2, 2, costs=MEASURED)
    require_refusals(
        ("none is given", lambda: compare([], tmp_path / "none.png")),
        ("forward and ms", lambda: compare([simulation, milliseconds], tmp_path / "two.png")),
        ("in forward, those of the step in ms", lambda: render_measured(planned, [step], tmp_path / "two.png")),
    )


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


def test_nothing_of_a_measured_step_is_cut_off(tmp_path: Path) -> None:
    simulation, step = measured(tmp_path, mesh="dp=2,pp=8")
    with house_style():
        require_readable(draw_measured(simulation, [step]))


def simulated(microbatches: int = 8, pp: int = 4) -> qs.Simulation:
    return qs.compile("1f1b", mesh=f"pp={pp}", microbatches=microbatches).simulate()


def test_boxes_are_those_of_the_whole_cut_at_the_edges() -> None:
    simulation = simulated()
    whole, part = stage_scene(simulation), scene_within(stage_scene(simulation), TimeWindow(range(1, 3), 4.5, 10.5))
    assert (part.ranks, part.makespan, part.names) == (2, 6.0, ("rank 1", "rank 2"))
    seen = {(box.rank + 1, box.start + 4.5, box.end + 4.5, box.instruction) for box in part.boxes}
    owed = {
        (box.rank, max(box.start, 4.5), min(box.end, 10.5), box.instruction)
        for box in whole.boxes
        if box.rank in (1, 2) and box.end > 4.5 and box.start < 10.5
    }
    assert seen == owed
    assert part.busy == pytest.approx([sum(b.end - b.start for b in part.boxes if b.rank == rank) for rank in (0, 1)])
    assert {arrow.source for arrow in part.arrows} | {arrow.target for arrow in part.arrows} == {0, 1}


def test_a_part_is_drawn_with_the_names_and_times_of_the_whole(tmp_path: Path) -> None:
    with house_style():
        sheet = draw_plan(simulated(), TimeWindow(range(2, 4), 10.0, 20.0))
        sheet.write_picture(tmp_path / "part.svg")
    text = (tmp_path / "part.svg").read_text("utf-8")
    for words in ("rank 2", "rank 3: peak", "ranks 2 to 3 of 4, time 10 to 20 of 33", ">20<"):
        assert words in text
    assert "rank 1" not in text


def test_the_grid_shows_the_part() -> None:
    part, whole = time_grid(simulated(), window=TimeWindow(range(1, 3), 1.0, 6.0)), time_grid(simulated())
    assert [row.split()[:2] for row in part] == [["rank", "1"], ["rank", "2"]]
    assert [row.split()[2:] for row in part] == [row.split()[3:8] for row in whole[1:3]]


def stalled(mesh="dp=2,pp=2", places=((4, "receive", 4), (3, "nothing", None), (None, None, None), (None, None, None))):
    """Return the report of a run whose ranks stand at these places; the first that waits for nobody is killed."""
    plan = qs.compile("1f1b", mesh=mesh, microbatches=4)
    states = []
    for rank in range(plan.mesh.size):
        index, kind, message = places[rank % len(places)]
        world = BlockingCall("collective", ranks=tuple(range(plan.mesh.size)))
        awaits = world if kind is None else BlockingCall(kind, message)
        fate = Fate("signal", 9) if rank == 1 else None
        states.append(RankState(rank, "a", rank, "step", 3, "train", index, 5.0, 0.1, fate, awaits, 3))
    return find_culprit(plan, states)


def drawn(report: StallReport):
    simulation = report.plan.simulate()
    with house_style():
        sheet = draw_stall(report, simulation)
        sheet.arrange()
    axes = max(sheet.figure.axes, key=lambda axes: len(axes.collections))
    return sheet, axes, {one.get_gid(): one for one in axes.collections}, simulation


def test_where_ranks_stand_is_marked():
    report = stalled()
    _, axes, parts, simulation = drawn(report)
    (fault,) = parts["culprits"].get_paths()
    span = simulation.timeline[1][3]
    assert fault.get_extents().x0 == span.start
    assert 1 < fault.get_extents().y0 < fault.get_extents().y1 < 2
    assert to_hex(parts["culprits"].get_edgecolor()[0]) == BLAME.lower()
    (stuck,) = parts["stuck"].get_paths()
    assert stuck.get_extents().x0 == simulation.timeline[0][4].start
    ends = [path.get_extents().x1 for path in parts["done"].get_paths()]
    assert ends == [simulation.timeline[0][4].start, span.start, simulation.makespan, simulation.makespan]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    said, waits = [text.get_text() for text in axes.texts], "waits for rank 1"
    assert [words for words in said if "rank" in words or words == "culprit"] == [waits, "culprit", waits, waits]


def test_nobody_is_marked_where_nobody_is_named():
    report = stalled(places=((None, None, None),) * 4)
    report = find_culprit(report.plan, [replace(state, fate=None) for state in report.states])
    assert not report.culprits
    _, _, parts, _ = drawn(report)
    assert not {"culprits", "stuck"} & set(parts)


@pytest.fixture(scope="module")
def tuning() -> qs.Tuning:
    model, hardware = qs.find_model("llama-2-7b"), qs.find_hardware("a100-80gb")
    return qs.tune(model, hardware, 16, 64, 2048, fixed={"cp": 1, "recompute": ("none", "full")}, top=4)


def test_every_point_is_inside(tuning: qs.Tuning) -> None:
    with house_style():
        sheet = draw_tuning(tuning)
    sheet.arrange()
    axes = next(axes for axes in sheet.figure.axes if axes.get_xlabel())
    lines = {line.get_gid(): line for line in axes.get_lines()}
    assert len(lines["best"].get_xdata()) == 4
    assert min(lines["front"].get_xdata()) == tuning.best[0].step_s
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    for line in (lines["best"], lines["front"]):
        assert all(left < x < right for x in line.get_xdata())
        assert all(low < y < high for y in line.get_ydata())
    assert low == 0
    assert high > tuning.hardware.memory_gb


def test_no_text_is_cut_off_or_on_another(tuning: qs.Tuning) -> None:
    with house_style():
        require_readable(draw_tuning(tuning))


SVG = "{http://www.w3.org/2000/svg}"


def read_svg(path: Path) -> ElementTree.Element:
    return ElementTree.fromstring(path.read_text(encoding="utf-8"))


def texts_of(root: ElementTree.Element) -> list[str]:
    return ["".join(element.itertext()).strip() for element in root.iter(f"{SVG}text")]


def count_drawn(root: ElementTree.Element, gid: str) -> int:
    """The number of paths in the groups of this name."""
    groups = [g for g in root.iter(f"{SVG}g") if g.get("id") == gid]
    drawn = [e for g in groups for e in g.iter() if e.tag in (f"{SVG}path", f"{SVG}use")]
    templates = [e for g in groups for d in g.iter(f"{SVG}defs") for e in d.iter(f"{SVG}path")]
    return len(drawn) - len(templates)


def visible_texts(sheet: Sheet) -> Iterator[tuple[str, Bbox]]:
    """Every text of a drawing with its place in pixels, as in a PNG."""
    canvas = FigureCanvasAgg(sheet.figure)
    sheet.figure.set_dpi(PNG_DPI)
    sheet.arrange()
    canvas.draw()
    for axes in sheet.figure.axes:
        labels = [axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            labels += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
        for text in (*axes.texts, *labels):
            if text.get_visible() and text.get_text().strip() and (text in axes.texts or axes.axison):
                yield text.get_text(), text.get_window_extent()


def require_readable(sheet: Sheet) -> None:
    """Assert that no text of a drawing is cut off or on top of another; call it within the house style."""
    texts, paper = list(visible_texts(sheet)), sheet.figure.bbox
    assert len(texts) > 10
    for text, box in texts:
        assert 0 <= box.x0 <= box.x1 <= paper.width, text
        assert 0 <= box.y0 <= box.y1 <= paper.height, text
    for (one, a), (other, b) in combinations(texts, 2):
        assert a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1, (one, other)
