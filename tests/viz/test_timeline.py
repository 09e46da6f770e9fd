"""Pictures of plans: valid files, everything in them, nothing cut off or on top of something else."""

import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import quintsched as qs
from quintsched.ir.instruction_set import Compute, Send
from quintsched.viz import compare, render
from quintsched.viz.draw_timeline import draw_comparison, draw_plan
from quintsched.viz.figure_sheet import PNG_DPI
from quintsched.viz.house_style import house_style, number
from tests.helpers.refusals import require_refusals

from .pictures import count_drawn, read_svg, require_readable, texts_of

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


def test_png_is_an_image_of_a_size_that_fits_the_plan(tmp_path: Path) -> None:
    render(simulate("1f1b", 4, 8), tmp_path / "small.png")
    render(simulate("1f1b", 8, 16), tmp_path / "large.png")
    sizes = []
    for name in ("small.png", "large.png"):
        with Image.open(tmp_path / name, formats=["PNG"]) as image:
            image.load()
            sizes.append(image.size)
    (small_width, small_height), (large_width, large_height) = sizes
    assert small_width == 9 * PNG_DPI
    assert small_width < large_width <= 28 * PNG_DPI
    assert 4 * PNG_DPI < small_height < large_height


def test_svg_says_what_the_plan_is(tmp_path: Path) -> None:
    simulation = simulate("1f1b", 4, 8, costs=MEASURED)
    render(simulation, tmp_path / "plan.svg")
    texts = texts_of(read_svg(tmp_path / "plan.svg"))
    assert simulation.plan.title in texts
    assert f"makespan {number(simulation.makespan)} ms" in "\n".join(texts)
    assert f"bubble {100 * simulation.bubble:.1f} % of all ranks' time" in "\n".join(texts)
    assert f"span bubble {100 * simulation.span_bubble:.1f} % of the longest rank's span" in "\n".join(texts)
    assert {"time (ms)", "forward", "backward", "idle", "optimizer step", *(f"rank {r}" for r in range(4))} <= {*texts}


@settings(max_examples=10, deadline=None)
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
    milliseconds = simulate("1f1b", 2, 2, costs=MEASURED)
    require_refusals(
        ("none is given", lambda: compare([], tmp_path / "none.png")),
        ("forward and ms", lambda: compare([simulation, milliseconds], tmp_path / "two.png")),
    )
