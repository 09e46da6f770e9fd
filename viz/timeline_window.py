"""Part of a scene: some ranks, from one time to another, cut at the edges and moved to time 0."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from quintsched.simulation.held_activations import HeldActivations
from quintsched.simulation.time_window import TimeWindow

from .house_style import number
from .timeline_objects import Arrow, Bar, ComputationBox, InstructionMark, Scene, Strip, WaitingTime

Span = TypeVar("Span", ComputationBox, Bar, WaitingTime, Strip)


def scene_within(scene: Scene, window: TimeWindow) -> Scene:
    """Return the part of a scene; its rows keep the names of their ranks, and note the busy time of the part."""
    boxes = tuple(_spans(scene.boxes, window))
    busy = [0.0] * len(window.ranks)
    for box in boxes:
        busy[box.rank] += (box.end - box.start) / box.lanes
    return replace(
        scene,
        ranks=len(window.ranks),
        makespan=window.end - window.start,
        busy=tuple(busy),
        boxes=boxes,
        arrows=tuple(_arrows(scene.arrows, window)),
        marks=tuple(_marks(scene.marks, window)),
        bars=tuple(_spans(scene.bars, window)),
        waits=tuple(_spans(scene.waits, window)),
        strips=tuple(_spans(scene.strips, window)),
        names=tuple(f"rank {rank}" for rank in window.ranks),
    )


def _spans(spans: Iterable[Span], window: TimeWindow) -> Iterable[Span]:
    for span in spans:
        start, end = max(span.start, window.start), min(span.end, window.end)
        if span.rank in window.ranks and end > start:
            rank = span.rank - window.ranks.start
            yield replace(span, rank=rank, start=start - window.start, end=end - window.start)


def _arrows(arrows: Iterable[Arrow], window: TimeWindow) -> Iterable[Arrow]:
    """Yield the messages that begin and end within the window."""
    first = window.ranks.start
    for arrow in arrows:
        inside = arrow.source in window.ranks and arrow.target in window.ranks
        if inside and window.start <= arrow.start and arrow.end <= window.end:
            start, end = arrow.start - window.start, arrow.end - window.start
            yield replace(arrow, source=arrow.source - first, target=arrow.target - first, start=start, end=end)


def _marks(marks: Iterable[InstructionMark], window: TimeWindow) -> Iterable[InstructionMark]:
    for mark in marks:
        if mark.rank in window.ranks and window.start <= mark.time <= window.end:
            yield replace(mark, rank=mark.rank - window.ranks.start, time=mark.time - window.start)


def held_within(held: tuple[HeldActivations, ...], window: TimeWindow) -> tuple[HeldActivations, ...]:
    """Return the activations of the window's ranks during it; the peaks are those of the window."""
    return tuple(_held(held[rank], window) for rank in window.ranks) if held else ()


def _held(held: HeldActivations, window: TimeWindow) -> HeldActivations:
    steps = [(time, amount) for time, amount in zip(held.times, held.amounts, strict=True) if time <= window.end]
    before = [amount for time, amount in steps if time <= window.start]
    inside = [(time - window.start, amount) for time, amount in steps if time > window.start]
    cut = [(0.0, before[-1] if before else 0.0), *inside]
    return HeldActivations(
        held.rank, tuple(time for time, _ in cut), tuple(amount for _, amount in cut), max(amount for _, amount in cut)
    )


def label_from(axes: Axes, start: float) -> None:
    """Label the time axis of a part with the times of the whole."""
    axes.xaxis.set_major_formatter(FuncFormatter(lambda time, _: number(time + start)))
