"""Pictures of a stall, where ranks stand is marked; and of a search, all of the best in it, nothing cut off."""

from dataclasses import replace

import pytest
from matplotlib.colors import to_hex

import quintsched as qs
from quintsched.stalls.culprit import find_culprit
from quintsched.stalls.last_reported_rank_states import BlockingCall, Fate, RankState
from quintsched.stalls.stall_report import StallReport
from quintsched.viz.frontier import draw_tuning
from quintsched.viz.house_style import house_style
from quintsched.viz.runs.stall_picture import BLAME, draw_stall

from .pictures import require_readable


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
