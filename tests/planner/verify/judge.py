"""A judge of plans that shares no code with the planner but the instructions.

`Judge` runs a plan under rendezvous to where nothing moves: each rank has a program counter, a send and its receive
advance together, a collective advances when all of its members have come to it. Values are tokens that have to be
there when they are taken. With no wildcard receive, the order in which ranks get their turn does not matter: one run
decides. What a plan says of itself (its head) is judged before, its spelled-out collectives by `MiniJudge`.
"""

from __future__ import annotations

from collections.abc import Iterator

from quintsched.ir.instruction_set import (
    AllGatherBucket,
    AllReduceBucket,
    Bwd,
    BwdInput,
    BwdWeight,
    ClipGrad,
    Compute,
    FetchAct,
    FreeParams,
    Fwd,
    GatherParams,
    Instruction,
    Message,
    OffloadAct,
    OptStep,
    Overlap,
    Recompute,
    Recv,
    RecvAct,
    RecvGrad,
    RecvSkip,
    RecvSkipGrad,
    ReduceScatterBucket,
    Send,
    SendAct,
    SendSkip,
    SendSkipGrad,
    ShareMetrics,
    SyncTied,
)
from quintsched.plan import Plan
from tests.planner.collectives.mini_mutants import MiniJudge
from tests.planner.verify.judge_head import head_faults
from tests.planner.verify.skip_judge import SkipJudge

Token = tuple[object, ...]
LASTING = {("metrics",), ("norm",)}


class Judge:
    """A maximal run of a plan; `finished` says whether every rank came to its end, `faults` what went wrong."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.faults, self.finished = head_faults(plan), False
        if not self.faults:
            self._run(plan)
            judges = map(MiniJudge, plan.communication.plans.values())
            self.faults += [f"{j.plan.title} is broken" for j in judges if not (j.right and j.careful)]

    def _run(self, plan: Plan) -> None:
        self.trains, self.slices = plan.mode == "train", plan.schedule.slices
        self.skips = SkipJudge(plan)
        self.neighbours = {
            (stage, unit): (
                route.stages[place - 1] if place else None,
                route.stages[place + 1] if place + 1 < len(route.stages) else None,
            )
            for route in plan.routes
            for place, stage in enumerate(route.stages)
            for unit in route.microbatches
        }
        self.order = self._order_of_backwards()
        self.pc = [0] * len(plan.programs)
        self.here: list[set[Token]] = [set() for _ in plan.programs]
        self.ever: list[set[Token]] = [set() for _ in plan.programs]
        while any(self._advance(rank) for rank in range(len(self.pc))):
            pass
        self.finished = all(self._next(rank) is None for rank in range(len(self.pc)))
        for tokens in self.here:
            self.faults += [f"{token} is left over" for token in tokens - LASTING]
        for (stage, unit), (_, after) in self.neighbours.items():
            owed = "weights" if self.trains else "loss" if after is None else "act"
            if (owed, stage, unit) not in self.ever[plan.stage_to_pp[stage]]:
                self.faults.append(f"stage {stage} never computes microbatch {unit}")

    def _order_of_backwards(self) -> dict[int, list[int]]:
        """The units of each stage in the order in which its rank completes their gradients."""
        order: dict[int, list[int]] = {}
        for program in self.plan.programs:
            for whole in program:
                i = Bwd(*whole.backward) if isinstance(whole, Overlap) else whole
                if isinstance(i, Bwd | BwdWeight):
                    order.setdefault(i.stage, []).append(i.microbatch)
        return order

    @property
    def good(self) -> bool:
        return self.finished and not self.faults

    def _next(self, rank: int) -> Instruction | None:
        program = self.plan.programs[rank]
        return program[self.pc[rank]] if self.pc[rank] < len(program) else None

    def _advance(self, rank: int) -> bool:
        """Let a rank do what it can do without waiting; return whether it did anything."""
        begin = self.pc[rank]
        while (i := self._next(rank)) is not None:
            if isinstance(i, Send):
                if not self._meet(rank, i):
                    break
            elif isinstance(i, Recv):
                break  # its sender takes it along
            elif isinstance(i, ShareMetrics | ClipGrad | SyncTied):
                members = range(len(self.pc))
                if isinstance(i, SyncTied):
                    members = sorted({self.plan.stage_to_pp[stage] for stage in i.stages})
                if rank not in members or any(self._next(member) != i for member in members):
                    break
                for member in members:
                    self._execute(member, i)
            else:
                self._execute(rank, i)
        return self.pc[rank] > begin

    def _meet(self, rank: int, i: Send) -> bool:
        if not 0 <= i.peer < len(self.pc) or i.peer == rank:
            return False
        other = self._next(i.peer)
        if not isinstance(other, Recv) or other.peer != rank:
            return False
        token, expected = self._carried(i), self._carried(other)
        self._execute(rank, i)
        self._execute(i.peer, other)
        if token is None or token != expected:
            self.faults.append(f"{i} meets {other}")
        return True

    def _carried(self, i: Message) -> Token | None:
        """Return the token of a message: a stage's output or its gradient, or a skip or its gradient."""
        if isinstance(i, SendSkip | RecvSkip | SendSkipGrad | RecvSkipGrad):
            return self.skips.carried(i) if (i.stage, i.microbatch) in self.neighbours else None
        before, after = self.neighbours.get((i.stage, i.microbatch), (None, None))
        if isinstance(i, SendAct | RecvGrad):
            return None if after is None else ("act" if isinstance(i, SendAct) else "grad", i.stage, i.microbatch)
        return None if before is None else ("act" if isinstance(i, RecvAct) else "grad", before, i.microbatch)

    def _execute(self, rank: int, i: Instruction) -> None:
        """Do the next instruction; of two side by side the backward first, which may take nothing of the forward."""
        self.pc[rank] += 1
        for part in (Bwd(*i.backward), Fwd(*i.forward)) if isinstance(i, Overlap) else (i,):
            self._do(rank, part)

    def _do(self, rank: int, i: Instruction) -> None:
        if isinstance(i, Compute | Message | OffloadAct | FetchAct):
            here = (i.stage, i.microbatch) in self.neighbours and self.plan.stage_to_pp[i.stage] == rank
            if not here:
                self.faults.append(f"{i} is not for rank {rank}")
            elif isinstance(i, Message):
                self._pass_on(rank, i)
            elif isinstance(i, Compute):
                self._compute(rank, i)
            else:
                self._copy(rank, i)
        elif isinstance(i, ShareMetrics):
            for stage, unit in self._owned(rank):
                if self.neighbours[stage, unit][1] is None or stage in self.plan.losses:
                    self._take(rank, "loss", stage, unit)
            self._give(rank, "metrics")
        elif isinstance(i, ClipGrad):
            for token in (("metrics",), *self._gradients(rank, self._stages(rank))):
                self._need(rank, *token)
            self._give(rank, "norm")
        else:
            self._of_stages(rank, i)

    def _of_stages(self, rank: int, i: Instruction) -> None:
        self._of_zero(i)
        stages = i.stages if isinstance(i, OptStep | SyncTied) else (i.stage,)
        mine = [stage for stage in stages if stage in self._stages(rank)]
        if isinstance(i, SyncTied):
            for stage in mine:
                for token in self._weights(rank, stage):
                    self._need(rank, *token)
                self._give(rank, "tied", stage, i.params, i.stages)
            if not all(("tied", stage, i.params, i.stages) in self._tied(stage) for stage in stages):
                self.faults.append(f"{i} ties what is not tied")
            return
        if len(mine) < len(stages):
            self.faults.append(f"{i} is not for rank {rank}")
        elif isinstance(i, AllReduceBucket):
            for token in (*self._weights(rank, i.stage), *self._tied(i.stage)):
                self._need(rank, *token)
            self._of_bucket(i)
            self._give(rank, "reduced", i.stage, i.bucket, 0)
        elif isinstance(i, ReduceScatterBucket):
            self._of_bucket(i)
            groups = self._groups(i.stage)
            if i.part >= len(groups):
                self.faults.append(f"there is no part {i.part}")
                return
            for unit in groups[i.part]:
                self._need(rank, "weights", i.stage, unit)
            for token in self._tied(i.stage):
                self._need(rank, *token)
            self._give(rank, "reduced", i.stage, i.bucket, i.part)
        elif isinstance(i, AllGatherBucket):
            self._of_bucket(i)
            self._take(rank, "stepped", i.stage, i.bucket)
        elif isinstance(i, GatherParams):
            if ("full", i.stage) in self.here[rank]:
                self.faults.append(f"{i} gathers what stands already")
            self.here[rank].add(("full", i.stage))
        elif isinstance(i, FreeParams):
            self._take(rank, "full", i.stage)
        elif isinstance(i, OptStep):
            if self.plan.zero.stage in (1, 2):
                for stage in stages:
                    for bucket in self._buckets():
                        self._give(rank, "stepped", stage, bucket)
            for token in (("metrics",), ("norm",)):
                self._need(rank, *token)
            for token in self._gradients(rank, stages):
                self._take(rank, *token)
        else:
            raise AssertionError(f"what is {i}?")

    def _of_zero(self, i: Instruction) -> None:
        """Each stage of ZeRO has instructions of its own."""
        fits = {
            AllReduceBucket: (0,),
            ReduceScatterBucket: (1, 2, 3),
            AllGatherBucket: (1, 2),
            GatherParams: (3,),
            FreeParams: (3,),
        }
        if self.plan.zero.stage not in fits.get(type(i), (0, 1, 2, 3)):
            self.faults.append(f"{i} has no place here")

    def _of_bucket(self, i: AllReduceBucket | ReduceScatterBucket | AllGatherBucket) -> None:
        if i.bucket not in self._buckets():
            self.faults.append(f"there is no bucket {i.bucket}")
        elif i.axes != self._buckets()[i.bucket]:
            self.faults.append(f"{i} is over other ranks than those that hold the same")

    def _groups(self, stage: int) -> list[list[int]]:
        """The units whose gradients are reduced together."""
        units, every = self.order.get(stage, []), self.plan.zero.every
        if self.plan.zero.stage < 2 or self._tied(stage):
            return [[unit for owner, unit in self.neighbours if owner == stage]]
        return [units[first : first + every] for first in range(0, len(units), every)]

    def _pass_on(self, rank: int, i: Message) -> None:
        token = self._carried(i)
        if token is None:
            self.faults.append(f"{i} has nobody to talk to")
        elif isinstance(i, Send):
            self._take(rank, *token)
        else:
            self._give(rank, *token)

    def _copy(self, rank: int, i: OffloadAct | FetchAct) -> None:
        """Activations go to the host and come back, once; who recomputes them has none that could go."""
        if self._recomputes(i.stage):
            self.faults.append(f"{i} moves what is dropped")
        way = ("saved", "on the host") if isinstance(i, OffloadAct) else ("on the host", "saved again")
        self._take(rank, way[0], i.stage, i.microbatch)
        self._give(rank, way[1], i.stage, i.microbatch)

    def _compute(self, rank: int, i: Compute) -> None:
        s, m = i.stage, i.microbatch
        before, after = self.neighbours[s, m]
        earlier, later = m % self.slices > 0, (m + 1) % self.slices > 0
        if self.plan.zero.stage == 3 and not isinstance(i, BwdWeight):
            self._need(rank, "full", s)
        if isinstance(i, Fwd):
            if before is not None:
                self._take(rank, "act", before, m)
            if earlier:
                self._need(rank, "keys", s, m - 1)
            if later:
                self._give(rank, "keys", s, m)
            self._exchange(rank, *self.skips.forward(s, m))
            if after is not None:
                self._give(rank, "act", s, m)
            if after is None or s in self.plan.losses:
                self._give(rank, "loss", s, m)
            if self.trains:
                self._give(rank, "checkpoint" if self._recomputes(s) else "saved", s, m)
            return
        if isinstance(i, Recompute):
            self._take(rank, "checkpoint", s, m)
            if earlier:
                self._need(rank, "keys", s, m - 1)
            self._give(rank, "saved", s, m)
            return
        if isinstance(i, Bwd | BwdInput):
            self._take(rank, "saved again" if ("saved again", s, m) in self.here[rank] else "saved", s, m)
            if after is not None:
                self._take(rank, "grad", s, m)
            if later:
                self._take(rank, "keys", s, m)
                self._take(rank, "keys grad", s, m)
            if earlier:
                self._give(rank, "keys grad", s, m - 1)
            self._exchange(rank, *self.skips.backward(s, m))
            if before is not None:
                self._give(rank, "grad", before, m)
        if isinstance(i, BwdInput):
            self._give(rank, "pending", s, m)
        else:
            if isinstance(i, BwdWeight):
                self._take(rank, "pending", s, m)
            self._give(rank, "weights", s, m)
            groups = self._groups(s)
            for part in [number - 1 for number, group in enumerate(groups) if number and m in group]:
                for bucket in self._buckets():
                    self._need(rank, "reduced", s, bucket, part)

    def _exchange(self, rank: int, takes: list[Token], gives: list[Token]) -> None:
        for token in takes:
            self._take(rank, *token)
        for token in gives:
            self._give(rank, *token)

    def _recomputes(self, stage: int) -> bool:
        return stage < len(self.plan.recompute) and self.plan.recompute[stage] > 0

    def _stages(self, rank: int) -> list[int]:
        return [stage for stage, holder in enumerate(self.plan.stage_to_pp) if holder == rank]

    def _owned(self, rank: int) -> list[tuple[int, int]]:
        return [place for place in self.neighbours if self.plan.stage_to_pp[place[0]] == rank]

    def _weights(self, rank: int, stage: int) -> list[Token]:
        return [("weights", stage, unit) for owner, unit in self._owned(rank) if owner == stage]

    def _tied(self, stage: int) -> list[Token]:
        parts = self.plan.stage_to_part or ()
        twins = tuple(other for other, part in enumerate(parts) if part == parts[stage])
        found: list[Token] = [("tied", stage, "stage", twins)] if len(twins) > 1 else []
        return found + [("tied", stage, name, held) for name, held in self.plan.tied.items() if stage in held]

    def _gradients(self, rank: int, stages: list[int] | tuple[int, ...]) -> Iterator[Token]:
        for stage in stages:
            yield from self._weights(rank, stage)
            yield from self._tied(stage)
            parts = range(len(self._groups(stage)))
            yield from (("reduced", stage, bucket, part) for bucket in self._buckets() for part in parts)

    def _buckets(self) -> dict[int, tuple[str, ...]]:
        """Return the buckets and the axes of their sums: dense weights, and where ep shards them, experts."""
        sizes, dense = dict(self.plan.mesh.axes), self.plan.buckets_per_stage
        over = tuple(name for name, size in sizes.items() if name in ("dp", "cp", "ep") and size > 1)
        without = tuple(name for name in over if name != "ep")
        buckets = {bucket: over for bucket in range(dense) if over}
        return buckets | {dense: without} if without and without != over else buckets

    def _give(self, rank: int, *token: object) -> None:
        if token in self.ever[rank]:
            self.faults.append(f"{token} is made a second time on rank {rank}")
        self.here[rank].add(token)
        self.ever[rank].add(token)

    def _need(self, rank: int, *token: object) -> None:
        if token not in self.here[rank]:
            self.faults.append(f"{token} is not on rank {rank}")

    def _take(self, rank: int, *token: object) -> None:
        self._need(rank, *token)
        self.here[rank].discard(token)
