"""Parts of a plan: the picture of some ranks and times is that piece of the whole picture."""

from pathlib import Path

import pytest

import quintsched as qs
from quintsched.simulation.time_grid import time_grid
from quintsched.simulation.time_window import Window
from quintsched.viz.draw_timeline import draw_plan
from quintsched.viz.house_style import house_style
from quintsched.viz.timeline_objects import stage_scene
from quintsched.viz.timeline_window import scene_within


def simulated(microbatches: int = 8, pp: int = 4) -> qs.Simulation:
    return qs.compile("1f1b", mesh=f"pp={pp}", microbatches=microbatches).simulate()


def test_boxes_are_those_of_the_whole_cut_at_the_edges() -> None:
    simulation = simulated()
    whole, part = stage_scene(simulation), scene_within(stage_scene(simulation), Window(range(1, 3), 4.5, 10.5))
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
        sheet = draw_plan(simulated(), Window(range(2, 4), 10.0, 20.0))
        sheet.write_picture(tmp_path / "part.svg")
    text = (tmp_path / "part.svg").read_text("utf-8")
    for words in ("rank 2", "rank 3: peak", "ranks 2 to 3 of 4, time 10 to 20 of 33", ">20<"):
        assert words in text
    assert "rank 1" not in text


def test_the_grid_shows_the_part() -> None:
    part, whole = time_grid(simulated(), window=Window(range(1, 3), 1.0, 6.0)), time_grid(simulated())
    assert [row.split()[:2] for row in part] == [["rank", "1"], ["rank", "2"]]
    assert [row.split()[2:] for row in part] == [row.split()[3:8] for row in whole[1:3]]
