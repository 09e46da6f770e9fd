"""The picture of a search: all of the best in it, by name, and nothing cut off."""

import pytest

import quintsched as qs
from quintsched.viz.frontier import draw_tuning
from quintsched.viz.house_style import house_style

from .pictures import require_readable


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
