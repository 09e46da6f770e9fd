"""Hypothesis strategies for the inputs of a plan; all of them shrink to the smallest and simplest."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from quintsched.ir.mesh import AXES, Mesh
from quintsched.schedules.kit import stage_placements
from quintsched.simulation.costs import Costs


@st.composite
def meshes(draw: st.DrawFn, *, max_pp: int = 6, max_size: int = 64, axes: Sequence[str] = AXES) -> Mesh:
    """Draw a mesh of at most `max_size` ranks and `max_pp` pipeline ranks, with some of `axes` in any order."""
    sizes, room = {}, max_size
    for axis in draw(st.lists(st.sampled_from(axes), unique=True)):
        sizes[axis] = draw(st.integers(1, min(room, max_pp if axis == "pp" else 4)))
        room //= sizes[axis]
    return Mesh(**sizes)


def microbatch_counts(*, most: int = 16, multiple_of: int = 1) -> st.SearchStrategy[int]:
    """Draw a number of microbatches up to `most`, a multiple of `multiple_of`."""
    return st.integers(1, most // multiple_of).map(lambda count: count * multiple_of)


@st.composite
def placements(draw: st.DrawFn, pp: int, *, max_chunks: int = 3) -> tuple[int, ...]:
    """Draw a placement of stages on ranks: linear, loop, V, or any order in which every rank has a stage."""
    chunks = draw(st.integers(1, max_chunks))
    known = [stage_placements.loop(pp, chunks), stage_placements.v(pp, chunks)]
    more = st.lists(st.integers(0, pp - 1), max_size=pp * (chunks - 1))
    shuffled = more.flatmap(lambda extra: st.permutations([*range(pp), *extra])).map(tuple)
    return draw(st.sampled_from(known) | shuffled)


@st.composite
def costs(draw: st.DrawFn, *, num_stages: int | None = None) -> Costs:
    """Draw costs in multiples of 0.5, so that times are exact; with `num_stages`, some per stage.

    Communication takes time too: messages, and exchanges inside stages, which overlapped pairs can hide.
    """
    halves = st.integers(0, 12).map(lambda count: count / 2)
    positive = st.integers(1, 12).map(lambda count: count / 2)

    def several(one: st.SearchStrategy[float]) -> st.SearchStrategy[float | tuple[float, ...]]:
        if num_stages is None:
            return one
        return one | st.lists(one, min_size=num_stages, max_size=num_stages).map(tuple)

    return Costs(
        forward=draw(several(positive)),
        backward_input=draw(several(positive)),
        backward_weight=draw(several(halves)),
        p2p=draw(halves),
        exchange=draw(several(halves)),
    )
