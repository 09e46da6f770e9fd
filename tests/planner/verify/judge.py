"""A judge of plans that shares no code with the planner but the instructions.

`Judge` runs a plan under rendezvous to where nothing moves: each rank has a program counter, a send and its receive
advance together, a collective advances when all of its members have come to it. Values are tokens that have to be
there when they are taken. With no wildcard receive, the order in which ranks get their turn does not matter: one run
decides. What a plan says of itself (its head) is judged before, its spelled-out collectives by `MiniJudge`.
"""

from collections.abc import Iterable, Iterator
from itertools import product

from quintsched.ir import instruction_set as ops
from quintsched.plan import Plan
from tests.planner.collectives.mini_mutants import MiniJudge
from tests.planner.verify.judge_head import head_faults
from tests.planner.verify.skip_judge import SkipJudge

Token = tuple[object, ...]
LASTING = {("metrics",), ("norm",)}
OF_ZERO: dict[type[ops.Instruction], tuple[int, ...]] = {
    **{ops.AllReduceBucket: (0,), ops.ReduceScatterBucket: (1, 2, 3), ops.AllGatherBucket: (1, 2)},
    **{ops.GatherParams: (3,), ops.FreeParams: (3,)},
}
"""Stages of ZeRO that have an instruction."""


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
        self.neighbours = {}
        for route in plan.routes:
            around = zip([None, *route.stages[:-1]], route.stages, [*route.stages[1:], None], strict=True)
            for (before, stage, after), unit in product(around if route.stages else (), route.microbatches):
                self.neighbours[stage, unit] = before, after
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
                i = ops.Bwd(*whole.backward) if isinstance(whole, ops.Overlap) else whole
                if isinstance(i, ops.Bwd | ops.BwdWeight):
                    order.setdefault(i.stage, []).append(i.microbatch)
        return order

    @property
    def good(self) -> bool:
        return self.finished and not self.faults

    def _next(self, rank: int) -> ops.Instruction | None:
        program = self.plan.programs[rank]
        return program[self.pc[rank]] if self.pc[rank] < len(program) else None

    def _advance(self, rank: int) -> bool:
        """Let a rank do what it can do without waiting; return whether it did anything."""
        begin = self.pc[rank]
        while (i := self._next(rank)) is not None:
            if isinstance(i, ops.Send):
                if not self._meet(rank, i):
                    break
            elif isinstance(i, ops.Recv):
                break  # its sender takes it along
            elif isinstance(i, ops.ShareMetrics | ops.ClipGrad | ops.SyncTied):
                members = range(len(self.pc))
                if isinstance(i, ops.SyncTied):
                    members = sorted({self.plan.stage_to_pp[stage] for stage in i.stages})
                if rank not in members or any(self._next(member) != i for member in members):
                    break
                for member in members:
                    self._execute(member, i)
            else:
                self._execute(rank, i)
        return self.pc[rank] > begin

    def _meet(self, rank: int, i: ops.Send) -> bool:
        if not 0 <= i.peer < len(self.pc) or i.peer == rank:
            return False
        other = self._next(i.peer)
        if not isinstance(other, ops.Recv) or other.peer != rank:
            return False
        token, expected = self._carried(i), self._carried(other)
        self._execute(rank, i)
        self._execute(i.peer, other)
        if token is None or token != expected:
            self.faults.append(f"{i} meets {other}")
        return True

    def _carried(self, i: ops.Message) -> Token | None:
        """Return the token of a message: a stage's output or its gradient, or a skip or its gradient."""
        if isinstance(i, ops.SendSkip | ops.RecvSkip | ops.SendSkipGrad | ops.RecvSkipGrad):
            return self.skips.carried(i) if (i.stage, i.microbatch) in self.neighbours else None
        if isinstance(i, ops.LOANS):
            return "lent", i.stage, i.microbatch
        before, after = self.neighbours.get((i.stage, i.microbatch), (None, None))
        if isinstance(i, ops.SendAct | ops.RecvGrad):
            return None if after is None else ("act" if isinstance(i, ops.SendAct) else "grad", i.stage, i.microbatch)
        return None if before is None else ("act" if isinstance(i, ops.RecvAct) else "grad", before, i.microbatch)

    def _execute(self, rank: int, i: ops.Instruction) -> None:
        """Do the next instruction; of two side by side the backward first, which may take nothing of the forward."""
        self.pc[rank] += 1
        for part in (ops.Bwd(*i.backward), ops.Fwd(*i.forward)) if isinstance(i, ops.Overlap) else (i,):
            self._do(rank, part)

    def _do(self, rank: int, i: ops.Instruction) -> None:
        if isinstance(i, ops.LOANS):
            self._exchange_loan(rank, i)
        elif isinstance(i, ops.Compute | ops.Message | ops.OffloadAct | ops.FetchAct):
            here = (i.stage, i.microbatch) in self.neighbours and self.plan.stage_to_pp[i.stage] == rank
            do = self._pass_on if isinstance(i, ops.Message) else self._copy
            do = self._compute if isinstance(i, ops.Compute) else do
            if here:
                do(rank, i)
            else:
                self.faults.append(f"{i} is not for rank {rank}")
        elif isinstance(i, ops.ShareMetrics):
            losses = (place for place in self._owned(rank) if self._has_loss(*place))
            self._take(rank, *(("loss", *place) for place in losses))
            self._give(rank, ("metrics",))
        elif isinstance(i, ops.ClipGrad):
            self._need(rank, ("metrics",), *self._gradients(rank, self._stages(rank)))
            self._give(rank, ("norm",))
        elif isinstance(i, ops.SyncTied):
            for stage in (stage for stage in i.stages if stage in self._stages(rank)):
                self._need(rank, *self._weights(rank, stage))
                self._give(rank, ("tied", stage, i.params, i.stages))
            if not all(("tied", stage, i.params, i.stages) in self._tied(stage) for stage in i.stages):
                self.faults.append(f"{i} ties what is not tied")
        else:
            self._of_stages(rank, i)

    def _of_stages(self, rank: int, i: ops.Instruction) -> None:
        if self.plan.zero.stage not in OF_ZERO.get(type(i), (0, 1, 2, 3)):
            self.faults.append(f"{i} has no place here")
        is_sum = isinstance(i, ops.AllReduceBucket | ops.ReduceScatterBucket | ops.AllGatherBucket)
        if is_sum and self._buckets().get(i.bucket) != i.axes:
            self.faults.append(f"there is no such bucket, or {i} is over other ranks than those that hold the same")
        stages = i.stages if isinstance(i, ops.OptStep) else (i.stage,)
        if not {*stages} <= {*self._stages(rank)}:
            self.faults.append(f"{i} is not for rank {rank}")
        elif isinstance(i, ops.AllReduceBucket):
            self._need(rank, *self._weights(rank, i.stage), *self._tied(i.stage))
            self._give(rank, ("reduced", i.stage, i.bucket, 0))
        elif isinstance(i, ops.ReduceScatterBucket):
            groups = self._groups(i.stage)
            if i.part >= len(groups):
                self.faults.append(f"there is no part {i.part}")
                return
            self._need(rank, *(("weights", i.stage, unit) for unit in groups[i.part]), *self._tied(i.stage))
            self._give(rank, ("reduced", i.stage, i.bucket, i.part))
        elif isinstance(i, ops.AllGatherBucket):
            self._take(rank, ("stepped", i.stage, i.bucket))
        elif isinstance(i, ops.GatherParams):
            if ("full", i.stage) in self.here[rank]:
                self.faults.append(f"{i} gathers what stands already")
            self.here[rank].add(("full", i.stage))
        elif isinstance(i, ops.FreeParams):
            self._take(rank, ("full", i.stage))
        elif isinstance(i, ops.OptStep):
            if self.plan.zero.stage in (1, 2):
                self._give(rank, *(("stepped", stage, bucket) for stage in stages for bucket in self._buckets()))
            self._need(rank, *LASTING)
            self._take(rank, *self._gradients(rank, stages))
        else:
            raise AssertionError(f"what is {i}?")

    def _groups(self, stage: int) -> list[list[int]]:
        """The units whose gradients are reduced together."""
        units, every = self.order.get(stage, []), self.plan.zero.every
        if self.plan.zero.stage < 2 or self._tied(stage):
            return [[unit for owner, unit in self.neighbours if owner == stage]]
        return [units[first : first + every] for first in range(0, len(units), every)]

    def _pass_on(self, rank: int, i: ops.Message) -> None:
        token = self._carried(i)
        if token is None:
            self.faults.append(f"{i} has nobody to talk to")
        elif isinstance(i, ops.Send):
            self._take(rank, token)
        else:
            self._give(rank, token)

    def _copy(self, rank: int, i: ops.OffloadAct | ops.FetchAct) -> None:
        """Activations go to the host and come back, once; who recomputes them has none that could go."""
        if self._recomputes(i.stage, i.microbatch):
            self.faults.append(f"{i} moves what is dropped")
        way = ("saved", "on the host") if isinstance(i, ops.OffloadAct) else ("on the host", "saved again")
        self._take(rank, (way[0], i.stage, i.microbatch))
        self._give(rank, (way[1], i.stage, i.microbatch))

    def _exchange_loan(self, rank: int, i: ops.Message) -> None:
        """Activations go from the rank of their stage to another one and back, once, and are the backward's again."""
        cell, lends = (i.stage, i.microbatch), isinstance(i, ops.LendAct | ops.ReclaimAct)
        if (
            cell not in self.neighbours
            or lends != (self.plan.stage_to_pp[i.stage] == rank)
            or self._recomputes(i.stage, i.microbatch)
        ):
            self.faults.append(f"{i} is not for rank {rank}")
        taken = {ops.LendAct: ["saved"], ops.ReturnAct: ["lent"], ops.ReclaimAct: ["loan"]}
        given = {ops.LendAct: ["loan"], ops.HoldAct: ["lent"], ops.ReclaimAct: ["saved again"]}
        self._take(rank, *((word, *cell) for word in taken.get(type(i), [])))
        self._give(rank, *((word, *cell) for word in given.get(type(i), [])))

    def _compute(self, rank: int, i: ops.Compute) -> None:
        s, m = i.stage, i.microbatch
        before, after = self.neighbours[s, m]
        earlier = [("keys", s, m - 1)] * (m % self.slices > 0)
        later = [("keys", s, m)] * ((m + 1) % self.slices > 0)
        if self.plan.zero.stage == 3 and not isinstance(i, ops.BwdWeight):
            self._need(rank, ("full", s))
        if isinstance(i, ops.Fwd):
            takes, gives = self.skips.forward(s, m)
            self._need(rank, *earlier)
            self._take(rank, *takes, *([] if before is None else [("act", before, m)]))
            gives += [] if after is None else [("act", s, m)]
            gives += [("loss", s, m)] if self._has_loss(s, m) else []
            gives += [("checkpoint" if self._recomputes(s, m) else "saved", s, m)] if self.trains else []
            self._give(rank, *gives, *later)
        elif isinstance(i, ops.Recompute):
            self._take(rank, ("checkpoint", s, m))
            self._need(rank, *earlier)
            self._give(rank, ("saved", s, m))
        else:
            if not isinstance(i, ops.BwdWeight):
                takes, gives = self.skips.backward(s, m)
                takes += [("saved again" if ("saved again", s, m) in self.here[rank] else "saved", s, m)]
                takes += [] if after is None else [("grad", s, m)]
                self._take(rank, *takes, *later, *(("keys grad", *key[1:]) for key in later))
                gives += [] if before is None else [("grad", before, m)]
                self._give(rank, *gives, *(("keys grad", *key[1:]) for key in earlier))
            if isinstance(i, ops.BwdInput):
                self._give(rank, ("pending", s, m))
                return
            self._take(rank, *([("pending", s, m)] if isinstance(i, ops.BwdWeight) else []))
            self._give(rank, ("weights", s, m))
            parts = [number - 1 for number, group in enumerate(self._groups(s)) if number and m in group]
            self._need(rank, *(("reduced", s, bucket, part) for part in parts for bucket in self._buckets()))

    def _has_loss(self, stage: int, unit: int) -> bool:
        return self.neighbours[stage, unit][1] is None or stage in self.plan.losses

    def _recomputes(self, stage: int, unit: int) -> bool:
        chosen = dict(enumerate(self.plan.recompute_microbatches))
        some = not chosen or unit // self.slices in chosen.get(stage, ())
        return some and stage < len(self.plan.recompute) and self.plan.recompute[stage] > 0

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

    def _gradients(self, rank: int, stages: Iterable[int]) -> Iterator[Token]:
        for stage in stages:
            yield from (*self._weights(rank, stage), *self._tied(stage))
            parts = range(len(self._groups(stage)))
            yield from (("reduced", stage, bucket, part) for bucket in self._buckets() for part in parts)

    def _buckets(self) -> dict[int, tuple[str, ...]]:
        """Return the buckets and the axes of their sums: dense weights, and where ep shards them, experts."""
        sizes, dense = dict(self.plan.mesh.axes), self.plan.buckets_per_stage
        over = tuple(name for name, size in sizes.items() if name in ("dp", "cp", "ep") and size > 1)
        without = tuple(name for name in over if name != "ep")
        buckets = {bucket: over for bucket in range(dense) if over}
        return buckets | {dense: without} if without and without != over else buckets

    def _give(self, rank: int, *tokens: Token) -> None:
        for token in tokens:
            if token in self.ever[rank]:
                self.faults.append(f"{token} is made a second time on rank {rank}")
            self.here[rank].add(token)
            self.ever[rank].add(token)

    def _need(self, rank: int, *tokens: Token) -> None:
        self.faults += [f"{token} is not on rank {rank}" for token in tokens if token not in self.here[rank]]

    def _take(self, rank: int, *tokens: Token) -> None:
        for token in tokens:
            self._need(rank, token)
            self.here[rank].discard(token)
