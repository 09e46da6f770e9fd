"""Hanayo (Liu et al., SC'23, arXiv:2308.15762): Chimera's two pipelines as waves, with one copy of the model.

The stages go down the ranks and up again, once per wave, so a rank holds two stages of each wave. A microbatch enters
every other beat, P in a round: with forwards and backwards of one beat, no two of them ever want a rank at once.

beat     0   1   2   3   4   5   6   7   8   9       P=2, one wave: rank 0 has the stages 0 and 3, rank 1 has 1 and 2
rank 0   0F0 .   0F1 3F0 3B0 3F1 3B1 0B0 .   0B1
rank 1   .   1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 .

The idle time of a round is that of Chimera with twice as many ranks. It falls with the number of waves, v/2, while the
number of messages rises. A backward takes longer than a beat, so ranks then wait between rounds too.
"""

from quintsched.ir.instruction_set import Bwd, Compute, Fwd
from quintsched.schedules.kit.constraints import whole_waves
from quintsched.schedules.kit.registry import MAX_CHUNKS, Order, Shape, schedule
from quintsched.schedules.kit.stage_placements import v


@schedule(
    "hanayo",
    summary="waves down the ranks and up again, in rounds of P microbatches",
    bubble="2(P-1)/v (max(F, I+W) + (M/P-1)|F-I-W|)",
    memory="P",
    placement=v,
    min_chunks=2,
    max_chunks=MAX_CHUNKS,
    constraint=whole_waves,
)
def hanayo(rank: int, shape: Shape) -> Order:
    """Return the computations of all stages by their beats."""
    stages = len(shape.stage_to_pp)
    found: list[tuple[int, Compute]] = []
    for microbatch in range(shape.microbatches):
        rounds, turn = divmod(microbatch, shape.pp)
        beat = 2 * (stages * rounds + turn)
        for stage in shape.stages_of(rank):
            found.append((beat + stage, Fwd(stage, microbatch)))
            found.append((beat + 2 * stages - 1 - stage, Bwd(stage, microbatch)))
    return [one for _, one in sorted(found, key=lambda beat: beat[0])]
