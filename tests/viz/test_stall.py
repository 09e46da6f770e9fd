"""Pictures of a stall: where ranks stand is marked, and the culprit's row stands out."""

from dataclasses import replace

from matplotlib.colors import to_hex

import quintsched as qs
from quintsched.stalls.culprit import find_culprit
from quintsched.stalls.last_reported_rank_states import BlockingCall, Fate, RankState
from quintsched.stalls.stall_report import StallReport
from quintsched.viz.house_style import house_style
from quintsched.viz.runs.stall_picture import BLAME, draw_stall


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
