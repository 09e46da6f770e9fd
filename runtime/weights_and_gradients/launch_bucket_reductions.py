"""Reduction of gradient buckets over replicas, in one fixed order, overlapped with the last backward.

    last backward    p9 p8 p7 · · p6 p5 · · · p4 …     a full bucket is ready (`hooks_that_fill_buckets`)
    launched                 [b0]      [b1]     ·      in the order of the plan's reductions, on all replicas alike
    AllReduceBucket                           [b2]     launches the rest

A bucket that is ready early waits for those before it. Buckets that need a sum besides backwards (tied weights, partial
sums over tp) are launched by the plan's instruction, after that sum; such sums run asynchronously, until a bucket is to
be reduced. Where replicas hold shards (ZeRO), `ReduceScatterBucket` launches them, as often as the plan has it, and
later operations (division, norm, clipping) run on each rank's shard.

    tied weight    stage 0 ─┐           twins    stage 0 (route 0) ─┐         partial sums    tp rank 0 ─┐
                            ├─ sum                                  ├─ sum                               ├─ sum
                   stage 3 ─┘                    stage 3 (route 1) ─┘                         tp rank 1 ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from torch import Tensor, nn

from quintsched.ir.instruction_set import AllReduceBucket, Instruction, ReduceScatterBucket

from ..comm import Group, Work
from ..parallel.mesh_groups import MeshGroups
from ..stage.tied_weights import TiedWeights
from .grad_buckets import GradBucket, GradBuckets, PlanBucket, WaitForWorks
from .losses_in_gradient_buckets import Room


class GradReducer:
    """Launches and finishes the sums and reductions of a rank's gradients.

    Args:
        buckets: all gradients of this rank's stages.
        groups: the groups of the mesh.
        tied: weights that several stages hold.
        sharded: whether replicas hold shards of the result: then partial sums over tp are reduced at the end of the
            step, on the smaller shards.
    """

    def __init__(self, buckets: GradBuckets, groups: MeshGroups, tied: TiedWeights, *, sharded: bool) -> None:
        self._buckets, self._groups, self._tied = buckets, groups, tied
        self.known: Container[nn.Parameter] = buckets.home
        """Parameters whose gradients are summed."""
        self._sharded = sharded
        self._order: list[tuple[int, GradBucket]] = []
        """Instruction of the program, and bucket, of each reduction."""
        self.note_start: Callable[[int], None] | None = None
        """Called with an instruction of which a reduction begins, while a trace is recorded."""
        self.program: Sequence[Instruction] | None = None
        self._num_launched = 0
        self._under_way: list[tuple[GradBucket, Work]] = []
        self._sums: list[tuple[Sequence[Tensor], Work | None]] = []
        self.accumulates = False
        """Whether gradients are accumulated further: only reductions into a kept shard are launched."""
        self.reshards = any(bucket.reshards for bucket in buckets.all)
        """Whether full gradients are resident only from a backward to their reduction."""
        self._piggybacked: Callable[[], Tensor] | None = None

    def has_partial_sums(self, stage: int) -> bool:
        """Whether a stage's gradients are partial sums over tp that are reduced right after its last backward."""
        return not self._sharded and any(bucket.stage == stage for bucket in self._buckets.partial_sums)

    def add_partial_sums(self, stage: int) -> None:
        """Start to all-reduce the partial sums of a stage over tp."""
        for bucket in self._buckets.partial_sums:
            if bucket.stage == stage and not self.accumulates:
                bucket.fill()
                self._sums.append(([bucket.flat], self._groups.tensor.all_reduce(bucket.flat)))

    def add_tied(self, params: str, stages: tuple[int, ...]) -> None:
        """Start to sum the gradients of weights that several stages hold: all of twins ("stage"), or a tied one."""
        if self._buckets.partial_sums:
            self._end_sums()  # tied gradients need complete partial sums
        if params == "stage":
            buckets = self._buckets.of_stages(stages)
            copies = [[bucket.flat] for bucket in buckets]
        else:
            homes = [self._buckets.home[parameter] for parameter in self._tied.copies(params)]
            buckets = [bucket for bucket, _ in homes]
            copies = [[view for _, view in homes]] if homes else []
        if self.accumulates and not any(bucket.reshards for bucket in buckets):
            return
        for bucket in buckets:
            bucket.fill()
        sharing = self._groups.sharing.get(stages)
        for here in copies:
            for other in here[1:]:
                here[0].add_(other)
            self._sums.append((here, sharing.group.all_reduce(here[0]) if sharing else None))

    def _end_sums(self) -> None:
        """Wait for the started sums, and copy each to the other copies on this rank."""
        for copies, work in self._sums:
            if work is not None:
                work.wait()
            for other in copies[1:]:
                other.copy_(copies[0])
        self._sums.clear()

    def follow_program(self, program: Sequence[Instruction]) -> None:
        """Adopt the order of a program's reductions, with repetitions, before its step begins."""
        if program is self.program:
            return
        self.program, of_plan = program, self._buckets.of_plan
        self._order = [
            (index, bucket)
            for index, i in enumerate(program)
            if isinstance(i, AllReduceBucket | ReduceScatterBucket)
            for bucket in of_plan.get(PlanBucket(i.stage, i.bucket), ())
            if not bucket.comes_summed
        ]

    def begin_step(self, piggybacked: Callable[[], Tensor] | None = None) -> None:
        """Prepare parameters for new gradients, whatever was done to them between steps.

        `piggybacked` returns the figures to piggyback on the last reduction; called when that is launched.
        """
        self._piggybacked = piggybacked
        for bucket in self._buckets.all:
            bucket.attach()

    def filled_by_backward(self, stage: int) -> list[GradBucket]:
        """Return the buckets of a stage that are launched as soon as its last backward has filled them."""
        return [bucket for bucket in self._buckets.of_stages([stage]) if self._is_filled_by_backwards(bucket)]

    def _is_filled_by_backwards(self, bucket: GradBucket) -> bool:
        is_summed = bucket in self._buckets.partial_sums or not self._tied.parameters.isdisjoint(bucket.parameters)
        is_reduced = bucket.replicas.size > 1 and not bucket.comes_summed
        return is_reduced and not is_summed

    def room_among(self, group: Group) -> Room | None:
        """Return the room for figures of the last reduction, if that runs over the ranks of a group."""
        last = self._order[-1][1] if self._order else None
        return last.room if last is not None and last.replicas.ranks == group.ranks else None

    def allocate_full(self, stage: int, wait: WaitForWorks) -> None:
        """Allocate full gradients of `stage`, after pending reductions have freed theirs."""
        self.finish_reductions(wait)
        for bucket in self._buckets.of_stages([stage]):
            bucket.allocate_full()

    def reduce(self, plan_bucket: PlanBucket) -> None:
        """Launch the rest of a plan's bucket; parameters that no backward reached are reduced as `NO_GRADIENT`."""
        if self._sums:
            self._end_sums()
        left = self._order[self._num_launched :]
        for _, bucket in left:
            if bucket.plan_bucket == plan_bucket:
                bucket.ready = True
        if left:
            self.launch_ready()

    def launch_ready(self) -> None:
        """Launch the next buckets in order, as long as they are ready and due."""
        while self._num_launched < len(self._order) and self._order[self._num_launched][1].ready:
            index, bucket = self._order[self._num_launched]
            bucket.ready = False  # it may be reduced again
            self._num_launched += 1
            if self.accumulates and not bucket.reshards:
                continue
            bucket.fill()
            if self._piggybacked is not None and bucket.room is not None:
                bucket.room.write_figures(self._piggybacked())  # the last reduction: all forwards are done
            if self.note_start is not None:
                self.note_start(index)
            self._under_way.append((bucket, bucket.reduce()))

    def hold(self, wait: WaitForWorks) -> None:
        """End a step whose gradients are accumulated further."""
        self._end_sums()
        self.finish_reductions(wait)
        self._num_launched = 0
        for bucket in self._buckets.all:
            bucket.missing, bucket.ready, bucket.notes_arrivals = set(bucket.parameters), False, False

    def finish_reductions(self, wait: WaitForWorks) -> None:
        """Wait for the pending reductions, and add their results to shards."""
        if self._under_way:
            buckets, works = zip(*self._under_way, strict=True)
            self._under_way.clear()
            wait(works)
            for bucket in buckets:
                if bucket.reshards:
                    bucket.finish_reduction()

    def complete(self, wait: WaitForWorks) -> None:
        """Wait until all gradients are complete sums."""
        if self._sums:
            self._end_sums()
        if self._under_way:
            self.finish_reductions(wait)
        for bucket in self._buckets.all if self.reshards else ():
            bucket.begin_sum()  # where nothing was reduced
        if self._sharded:
            wait([self._groups.tensor.all_reduce(bucket.shard) for bucket in self._buckets.partial_sums])
        self._num_launched = 0
        for bucket in self._buckets.all:
            if bucket.blank:
                bucket.fill()
            bucket.give()

    def sums(self) -> list[Tensor]:
        """Return this rank's part of all gradients, parameter by parameter."""
        return [gradient for bucket in self._buckets.all for gradient in bucket.held() if gradient is not None]

    def clear_all(self) -> None:
        """Discard all gradients, so that they can be computed again."""
        for bucket in self._buckets.all:
            bucket.clear(afresh=False)

    def give(self) -> None:
        """Set `.grad` of everything that optimizers step to its bucket's view, whatever has filled that."""
        for bucket in self._buckets.all:
            bucket.give()

    def of_stages(self, stages: Sequence[int]) -> list[GradBucket]:
        """Return the buckets of these stages."""
        return self._buckets.of_stages(stages)
