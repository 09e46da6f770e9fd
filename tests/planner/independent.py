"""A second opinion on plans: an execution and a timing that share no code with the planner but the instructions.

`Execution` runs a plan under rendezvous: each rank has a program counter, a send and its receive advance together,
a collective advances when all ranks have come to it. Values are tokens that have to be there when they are taken.
With no wildcard receive, the order in which ranks get their turn does not matter: one run decides.

`times` is the longest path, found by asking each instruction when its inputs are there.

Only for one route 0, 1, 2, … as all plans of these tests have.
"""

from fractions import Fraction

from quintsched.instructions import (
    AllReduceBucket,
    Bwd,
    ClipGrad,
    Fwd,
    Instruction,
    OptStep,
    RecvAct,
    RecvGrad,
    SendAct,
    SendGrad,
    ShareMetrics,
)
from quintsched.plan import Plan

SENDS, RECVS, TOGETHER = (SendAct, SendGrad), (RecvAct, RecvGrad), (ShareMetrics, ClipGrad)
LASTING = {("metrics",), ("norm",)}
Token = tuple[object, ...]


class Execution:
    """A maximal run of a plan; `finished` says whether every rank came to its end, `faults` what went wrong."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.last_stage = len(plan.stage_to_pp) - 1
        self.pc = [0] * len(plan.programs)
        self.here: list[set[Token]] = [set() for _ in plan.programs]
        self.ever: list[set[Token]] = [set() for _ in plan.programs]
        self.faults: list[str] = []
        while self._advance_any():
            pass
        self.finished = all(self._next(rank) is None for rank in range(len(self.pc)))
        for tokens in self.here:
            self.faults += [f"{token} is left over" for token in tokens - LASTING]

    @property
    def good(self) -> bool:
        return self.finished and not self.faults

    def _next(self, rank: int) -> Instruction | None:
        program = self.plan.programs[rank]
        return program[self.pc[rank]] if self.pc[rank] < len(program) else None

    def _advance_any(self) -> bool:
        heads = [self._next(rank) for rank in range(len(self.pc))]
        if all(isinstance(head, TOGETHER) for head in heads):
            if len({type(head) for head in heads}) > 1:
                return False
            for rank, head in enumerate(heads):
                self._execute(rank, head)
            return True
        return any(self._advance(rank) for rank in range(len(heads)))

    def _advance(self, rank: int) -> bool:
        i = self._next(rank)
        if i is None or isinstance(i, (*TOGETHER, *RECVS)):
            return False
        if isinstance(i, SENDS):
            if not 0 <= i.peer < len(self.pc) or i.peer == rank:
                return False
            other = self._next(i.peer)
            if not isinstance(other, RECVS) or other.peer != rank:
                return False
            self._execute(rank, i)
            self._execute(i.peer, other)
            sent = (i.stage, i.microbatch) if isinstance(i, SendAct) else (i.stage - 1, i.microbatch)
            wanted = (
                (other.stage - 1, other.microbatch) if isinstance(other, RecvAct) else (other.stage, other.microbatch)
            )
            if sent != wanted or isinstance(i, SendAct) != isinstance(other, RecvAct):
                self.faults.append(f"{i} meets {other}")
            return True
        self._execute(rank, i)
        return True

    def _execute(self, rank: int, i: Instruction) -> None:
        self.pc[rank] += 1
        for stage in getattr(i, "stages", (getattr(i, "stage", None),)):
            if stage is not None and not (0 <= stage <= self.last_stage and self.plan.stage_to_pp[stage] == rank):
                self.faults.append(f"{i} is not for rank {rank}")
                return
        trains, last = self.plan.mode == "train", self.last_stage
        if isinstance(i, Fwd):
            s, m = i.stage, i.microbatch
            if s > 0:
                self._take(rank, "act", s - 1, m)
            self._give(rank, *(("act", s, m) if s < last else ("loss", m)))
            if trains:
                self._give(rank, "saved", s, m)
        elif isinstance(i, Bwd):
            s, m = i.stage, i.microbatch
            self._take(rank, "saved", s, m)
            if s < last:
                self._take(rank, "grad", s, m)
            if s > 0:
                self._give(rank, "grad", s - 1, m)
            self._give(rank, "weights", s, m)
        elif isinstance(i, SendAct):
            self._take(rank, "act", i.stage, i.microbatch)
        elif isinstance(i, RecvAct):
            self._give(rank, "act", i.stage - 1, i.microbatch)
        elif isinstance(i, SendGrad):
            self._take(rank, "grad", i.stage - 1, i.microbatch)
        elif isinstance(i, RecvGrad):
            self._give(rank, "grad", i.stage, i.microbatch)
        elif isinstance(i, AllReduceBucket):
            for m in range(self.plan.schedule.microbatches):
                self._need(rank, "weights", i.stage, m)
            self._give(rank, "reduced", i.stage, i.bucket)
        elif isinstance(i, ShareMetrics):
            if self.plan.stage_to_pp[last] == rank:
                for m in range(self.plan.schedule.microbatches):
                    self._take(rank, "loss", m)
            self._give(rank, "metrics")
        elif isinstance(i, ClipGrad):
            self._need(rank, "metrics")
            for stage in self._stages(rank):
                for token in self._gradients(stage):
                    self._need(rank, *token)
            self._give(rank, "norm")
        elif isinstance(i, OptStep):
            self._need(rank, "metrics")
            self._need(rank, "norm")
            for stage in i.stages:
                for token in self._gradients(stage):
                    self._take(rank, *token)
        else:
            raise AssertionError(f"what is {i}?")

    def _stages(self, rank: int) -> list[int]:
        return [stage for stage, holder in enumerate(self.plan.stage_to_pp) if holder == rank]

    def _gradients(self, stage: int) -> list[Token]:
        replicas = [size for name, size in self.plan.mesh.axes if name in ("dp", "cp", "ep") and size > 1]
        return [("weights", stage, m) for m in range(self.plan.schedule.microbatches)] + [
            ("reduced", stage, bucket) for bucket in range(self.plan.buckets_per_stage if replicas else 0)
        ]

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


Key = tuple[str, int, int]


def times(
    orders: list[list[tuple[str, int, int]]],
    stage_to_pp: tuple[int, ...],
    forward: list[Fraction],
    backward: list[Fraction],
    p2p: Fraction = Fraction(0),
) -> dict[Key, Fraction]:
    """Return when each ("F" or "B", stage, microbatch) ends, given each rank's order of them.

    Repeats until nothing changes: a computation starts after the one before it on its rank and when its input has
    come; a message starts when its value is made and the message before it on its channel has come.
    """
    last = len(stage_to_pp) - 1
    ends: dict[Key, Fraction] = {unit: Fraction(0) for order in orders for unit in order}
    while True:
        arrivals = _arrivals(orders, stage_to_pp, ends, p2p)
        new: dict[Key, Fraction] = {}
        for order in orders:
            clock = Fraction(0)
            for kind, stage, microbatch in order:
                if kind == "F":
                    inputs = [("F", stage - 1, microbatch)] if stage else []
                else:
                    inputs = [("F", stage, microbatch)] + ([("B", stage + 1, microbatch)] if stage < last else [])
                ready = max([clock, *(arrivals.get((unit, stage), ends[unit]) for unit in inputs)])
                clock = ready + (forward if kind == "F" else backward)[stage]
                new[kind, stage, microbatch] = clock
        if new == ends:
            return ends
        ends = new


def _arrivals(
    orders: list[list[tuple[str, int, int]]], stage_to_pp: tuple[int, ...], ends: dict[Key, Fraction], p2p: Fraction
) -> dict[tuple[Key, int], Fraction]:
    """Return when each value has come to the rank of the stage that takes it; channels keep the receiver's order."""
    found: dict[tuple[Key, int], Fraction] = {}
    for rank, order in enumerate(orders):
        free: dict[int, Fraction] = {}
        for kind, stage, microbatch in order:
            neighbour = stage - 1 if kind == "F" else stage + 1
            if not 0 <= neighbour < len(stage_to_pp) or stage_to_pp[neighbour] == rank:
                continue
            source, value = stage_to_pp[neighbour], (kind, neighbour, microbatch)
            found[value, stage] = free[source] = max(free.get(source, Fraction(0)), ends[value]) + p2p
    return found


def orders_of(plan: Plan) -> list[list[tuple[str, int, int]]]:
    """Return the computations of each rank, in program order."""
    return [
        [("F" if isinstance(i, Fwd) else "B", i.stage, i.microbatch) for i in program if isinstance(i, Fwd | Bwd)]
        for program in plan.programs
    ]


def peaks(plan: Plan) -> list[Fraction]:
    """Return the most microbatches' activations that stand on each rank, counting forwards and backwards."""
    found = []
    for order in orders_of(plan):
        standing, most = 0, 0
        for kind, _, _ in order:
            standing += 1 if kind == "F" else -1
            most = max(most, standing)
        found.append(Fraction(most, plan.schedule.chunks) if plan.mode == "train" else Fraction(0))
    return found
