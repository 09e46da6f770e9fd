"""Pictures of plans: valid files, everything in them, nothing cut off or on top of something else."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import matplotlib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import quintsched as qs
from quintsched.ir.instruction_set import Compute, FetchAct, Fwd, HostCopy, OffloadAct, Overlap, Send
from quintsched.simulation.held_activations import ROUNDING, held_activations
from quintsched.viz import compare, render
from quintsched.viz.draw_timeline import draw_comparison, draw_plan
from quintsched.viz.figure_sheet import PNG_DPI
from quintsched.viz.house_style import house_style, number, shade
from quintsched.viz.instruction_colours import LOOKS
from quintsched.viz.timeline_objects import stage_scene

from .pictures import count_drawn, read_svg, require_readable, texts_of

MEASURED = qs.Costs(unit="ms", forward=18.5, backward_input=18.1, backward_weight=9.3, p2p=0.6)


def simulate(
    name: str,
    pp: int,
    microbatches: int,
    chunks: int | None = None,
    costs: qs.Costs | None = None,
    *,
    overlap: bool = False,
) -> qs.Simulation:
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
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        with Image.open(tmp_path / name) as image:
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
def test_every_computation_and_message_is_drawn(
    tmp_path_factory: pytest.TempPathFactory, simulation: qs.Simulation
) -> None:
    path = tmp_path_factory.mktemp("svg") / "plan.svg"
    render(simulation, path)
    root = read_svg(path)
    instructions = [i for program in simulation.plan.programs for i in program]
    computations = [side for i in instructions for side in i.sides if isinstance(side, Compute)]
    assert count_drawn(root, "computations") == len(computations)
    assert count_drawn(root, "messages") == sum(isinstance(i, Send) for i in instructions)
    written = Counter(text for text in texts_of(root) if text.isdecimal())
    assert not Counter(str(i.microbatch) for i in computations) - written


@pytest.mark.parametrize(
    ("zero", "labels"),
    [
        (0, {"gradients reduced"}),
        (2, {"gradients reduced, shards kept", "stepped weights gathered"}),
        (3, {"gradients reduced, shards kept", "weights gathered", "weights dropped"}),
    ],
)
def test_what_replicas_share_out_is_drawn(tmp_path: Path, zero: int, labels: set[str]) -> None:
    plan = qs.compile("interleaved-1f1b", mesh="dp=2,pp=2", microbatches=2, chunks=2, zero=zero)
    render(plan.simulate(qs.Costs(gather_params=0.5, reduce_scatter=0.5)), tmp_path / "plan.svg")
    written = {text for text in texts_of(read_svg(tmp_path / "plan.svg")) if "gradients" in text or "weights" in text}
    assert written == labels


@pytest.mark.parametrize("name", PAIRED)
def test_of_a_pair_the_forward_is_above_the_backward_each_in_its_own_colours(name: str) -> None:
    simulation = simulate(name, 2, 6, overlap=True)
    scene, pairs = stage_scene(simulation), 0
    with house_style():
        collections = [found for axes in draw_plan(simulation).figure.axes for found in axes.collections]
    (drawn,) = (found for found in collections if found.get_gid() == "computations")
    for box, path, colour in zip(scene.boxes, drawn.get_paths(), drawn.get_facecolors(), strict=True):
        top, bottom = min(path.vertices[:, 1]), max(path.vertices[:, 1])
        chunk = simulation.plan.layout.stages_of(box.rank).index(box.instruction.stage)
        assert tuple(colour[:3]) == pytest.approx(shade(LOOKS[type(box.instruction)].colour, chunk, scene.chunks))
        if box.lanes == 1:
            assert top + bottom == pytest.approx(2 * box.rank + 1)
        else:
            assert (bottom if isinstance(box.instruction, Fwd) else top) == pytest.approx(box.rank + 0.5)
            pairs += 1
    assert pairs == 2 * len(simulation.plan.columns.rows_where(Overlap)) > 0


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_same_plan_same_bytes_whatever_the_caller_has_set(tmp_path: Path, suffix: str) -> None:
    def draw(name: str) -> bytes:
        render(simulate("1f1b", 2, 3), tmp_path / f"{name}{suffix}")
        compare([simulate("1f1b", 2, 3), simulate("gpipe", 2, 3)], tmp_path / f"{name}-both{suffix}")
        return (tmp_path / f"{name}{suffix}").read_bytes() + (tmp_path / f"{name}-both{suffix}").read_bytes()

    first = draw("first")
    with matplotlib.rc_context({"font.size": 30, "figure.dpi": 40, "svg.fonttype": "path", "axes.grid": True}):
        assert draw("second") == first
        assert matplotlib.rcParams["font.size"] == 30
    assert str(tmp_path).encode() not in first


@settings(max_examples=40, deadline=None)
@given(simulations(most_ranks=6))
def test_held_activations_are_those_between_a_forward_and_its_backward(simulation: qs.Simulation) -> None:
    held = held_activations(simulation, simulation.costs)
    if simulation.plan.mode == "forward":
        assert held == ()
        return
    assert [h.peak for h in held] == pytest.approx(simulation.peak_activations)
    boxes = stage_scene(simulation).boxes
    for rank, of_rank in enumerate(held):
        assert of_rank.amounts[-1] == 0
        spans: dict[tuple[int, int], list[float]] = {}
        for box in boxes:
            if box.rank == rank:
                at = (box.instruction.stage, box.instruction.microbatch)
                spans.setdefault(at, []).extend((box.start, box.end))
        for start, end, amount in zip(of_rank.times, of_rank.times[1:], of_rank.amounts, strict=False):
            if end - start > 2 * ROUNDING * simulation.makespan:
                middle = (start + end) / 2
                standing = sum(min(times) <= middle < max(times) for times in spans.values())
                assert amount == pytest.approx(standing / simulation.plan.schedule.chunks)


def test_only_training_has_a_memory_panel(tmp_path: Path) -> None:
    for name in ("1f1b", "inference"):
        render(simulate(name, 2, 4), tmp_path / f"{name}.svg")
    assert "rank 0: peak 2" in texts_of(read_svg(tmp_path / "1f1b.svg"))
    assert "peak" not in (tmp_path / "inference.svg").read_text(encoding="utf-8")


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


def test_comparison_shows_every_schedule_with_its_figures(tmp_path: Path) -> None:
    drawn = [simulate("gpipe", 4, 8), simulate("interleaved-1f1b", 4, 8, 2)]
    compare(drawn, tmp_path / "both.svg")
    root = read_svg(tmp_path / "both.svg")
    texts = "\n".join(texts_of(root))
    for simulation in drawn:
        assert simulation.plan.title in texts
        assert f"makespan {number(simulation.makespan)} forwards" in texts
        assert f"peak activations {number(max(simulation.peak_activations))}" in texts
    assert count_drawn(root, "computations") == 4 * (16 + 32)
    assert all(f"{cause} " in texts for cause in ("computing", "warm-up", "cool-down"))
    assert texts.count("waits for rank 1") == 2
    assert texts.count("activations held") == 2


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
    with pytest.raises(qs.UsageError, match="none is given"):
        compare([], tmp_path / "none.png")
    with pytest.raises(qs.UsageError, match="forward and ms"):
        compare([simulation, simulate("1f1b", 2, 2, costs=MEASURED)], tmp_path / "two.png")


def test_drawing_leaves_pyplot_alone(tmp_path: Path) -> None:
    render(simulate("1f1b", 1, 1), tmp_path / "plan.png")
    assert "matplotlib.pyplot" not in sys.modules


def test_copies_to_the_host_run_beside_computations(tmp_path: Path) -> None:
    plan = qs.compile("1f1b", mesh="pp=4", microbatches=8, offload=2)
    simulation = plan.simulate(qs.Costs(host_bandwidth=0.8))
    render(simulation, tmp_path / "plan.svg")
    root = read_svg(tmp_path / "plan.svg")
    copies = [i for program in plan.programs for i in program if isinstance(i, HostCopy)]
    assert count_drawn(root, "host-copies") == len(copies) > 0
    assert {"activations to the host", "activations fetched"} <= {*texts_of(root)}
    assert max(held.peak for held in held_activations(simulation, simulation.costs)) <= 2
    assert not stage_scene(plan.simulate()).strips, "what takes no time is a mark"
    assert {OffloadAct, FetchAct} <= {mark.what for mark in stage_scene(plan.simulate()).marks}
