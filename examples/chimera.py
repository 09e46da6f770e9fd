"""User-defined schedule with routes of its own: Chimera (Li and Hoefler, SC'21) with four pipelines.

Half of the pipelines go down the ranks and half go up, each pair starting at another rank; the bubble of one
pipeline is used by another. Every rank holds a stage of each pipeline. On four ranks:

    pipeline 0   stages 0 1 2 3     ranks 0 1 2 3        pipeline 2   stages 8 9 10 11     ranks 2 3 0 1
    pipeline 1   stages 4 5 6 7     ranks 3 2 1 0        pipeline 3   stages 12 13 14 15   ranks 1 0 3 2

    quintsched check examples/chimera.py:chimera --pp 4..8 --microbatches 1..16
    quintsched compile --schedule examples/chimera.py:chimera --mesh pp=4 --microbatches 8 -o plan.json
"""

import quintsched as qs
from quintsched.instructions import Bwd, Fwd
from quintsched.schedules import Order, Shape

PIPELINES = 4


def crossed(pp: int, chunks: int) -> tuple[int, ...]:
    """Place the stages of a pair of pipelines, one down and one up, from every (P / pairs)-th rank on."""
    lines = [[(first + place) % pp for place in range(pp)] for first in range(0, pp, max(2 * pp // PIPELINES, 1))]
    return tuple(rank for line in lines for way in (line, line[::-1]) for rank in way)


def pipelines(shape: Shape) -> list[tuple[range, range]]:
    """Give each pipeline its stages and an equal share of the microbatches."""
    pp, share = shape.pp, shape.microbatches // PIPELINES
    return [(range(k * pp, (k + 1) * pp), range(k * share, (k + 1) * share)) for k in range(PIPELINES)]


def parts(shape: Shape) -> list[int]:
    """Return the part of the model that each stage holds: each pipeline has all of them."""
    return [*range(shape.pp)] * PIPELINES


def shared_out(shape: Shape) -> str | None:
    """P and M multiples of the number of pipelines"""
    if shape.pp % PIPELINES or shape.microbatches % PIPELINES:
        return (
            f"pp={shape.pp} and {shape.microbatches} microbatches: {PIPELINES} pipelines want multiples of {PIPELINES}"
        )
    return None


@qs.schedule(
    "chimera-4", summary="pipelines down and up, each pair from another rank on", bubble="0 at P=4", memory="P",
    placement=crossed, routes=pipelines, stage_to_part=parts, constraint=shared_out,
)  # fmt: skip
def chimera(rank: int, shape: Shape) -> Order:
    """Return a rank's order by time: a forward takes a beat, a backward two, and the next round begins after both."""
    found = []
    for stages, microbatches in pipelines(shape):
        for number, microbatch in enumerate(microbatches):
            rounds, turn = divmod(number, shape.pp // PIPELINES)
            begins, ends = 3 * shape.pp * rounds + 2 * turn, 3 * shape.pp * (rounds + 1) + 2 * turn
            for place, stage in enumerate(stages):
                if shape.stage_to_pp[stage] == rank:
                    found += [(begins + place, Fwd(stage, microbatch)), (ends - 2 * place, Bwd(stage, microbatch))]
    return [instruction for _, instruction in sorted(found, key=lambda one: one[0])]
