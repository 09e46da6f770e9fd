"""A judge of plans on a transport: the ranks' hosts, and the collectives that they have launched.

A message or a sum is only issued; a computation waits for what it takes; the gradient norm waits for all ranks, and
each end of a loan for the other one. Where messages have tags, those stand for issued when their value is made.

    rank 0   launched  a, b      NCCL may run the collectives of a rank one at a time: one is done when it is the first
    rank 1   launched  b, a      that each of its members has launched and that is not done; gloo has a line per group
"""

from collections import defaultdict, deque

from quintsched.ir import instruction_set as ops
from quintsched.ir.dataflow_analysis import Value
from quintsched.plan import Plan

Line = tuple[int, tuple[int, ...] | None]
"""Of a rank: of a group, or of all of its groups."""
Launched = ops.Instruction | tuple[int, int]
"""Collective of pipeline ranks; or among the replicas of one, as (rank, index)."""
BOTH_ENDS = [(ops.LendAct, ops.HoldAct), (ops.ReturnAct, ops.ReclaimAct)]
OTHER_END = dict([*BOTH_ENDS, *(pair[::-1] for pair in BOTH_ENDS)])


class Hosts:
    """The ranks' hosts, each with a program counter; a plan's data flow must be sound. `profile`: channel or tagged."""

    def __init__(self, plan: Plan, profile: str) -> None:
        self.programs = plan.programs
        self.flows = [plan.flows.of_rows(plan.columns.rows_of(rank)) for rank in range(len(plan.programs))]
        self.made = [
            {value: index for index, made in enumerate(flows) for value in made.produces} for flows in self.flows
        ]
        self.stage_to_pp = plan.stage_to_pp
        self.tagged = profile == "tagged"
        self.counters = [0] * len(plan.programs)
        self.launched = [0] * len(plan.programs)
        self.lines: defaultdict[Line, deque[Launched]] = defaultdict(deque)
        self.done: set[Launched] = set()

    def finish(self) -> bool:
        """Let all go on until nobody can; return whether all have come to the end, and all collectives are done."""
        while any(self._advance(rank) for rank in self._ranks()):
            pass
        ends = all(at == len(program) for at, program in zip(self.counters, self.programs, strict=True))
        return ends and not any(self.lines.values())

    def _advance(self, rank: int) -> bool:
        begin = self.counters[rank]
        while self.counters[rank] < len(self.programs[rank]) and self._may_pass(rank, self.counters[rank]):
            self.counters[rank] += 1
        return self.counters[rank] > begin

    def _may_pass(self, rank: int, index: int) -> bool:
        instruction, uses = self.programs[rank][index], self.flows[rank][index]
        if isinstance(instruction, ops.ShareMetrics | ops.SyncTied | ops.ClipGrad) and self.launched[rank] <= index:
            self.launched[rank] = index + 1
            self.lines[self._line(rank, instruction)].append(instruction)
            self._run_collectives()
        if isinstance(instruction, ops.AMONG_REPLICAS) and not self.tagged:
            return self._is_next(rank, index)
        if isinstance(instruction, ops.LOANS):
            return self._is_met(rank, instruction)
        if isinstance(instruction, ops.Message | ops.ShareMetrics | ops.SyncTied):
            return True
        if isinstance(instruction, ops.ClipGrad) and instruction not in self.done:
            return False
        return all(self._is_there(rank, value) for value in (*uses.consumes, *uses.reads))

    def _run_collectives(self) -> None:
        """Do every collective that has come to the front of its line on all of its ranks."""
        fronts = [line[0] for line in self.lines.values() if line]
        for i in fronts:
            lines = [self.lines[self._line(rank, i)] for rank in self._members(i)]
            if all(line and line[0] == i for line in lines):
                for line in lines:
                    line.popleft()
                    fronts += [line[0]] if line else []
                self.done.add(i)

    def _is_next(self, rank: int, index: int) -> bool:
        """Launch a collective among replicas; return whether all that its rank launched before is done."""
        if self.launched[rank] <= index:
            self.launched[rank] = index + 1
            self.lines[rank, None].append((rank, index))
            self._run_collectives()
        return (rank, index) in self.done

    def _line(self, rank: int, i: Launched) -> Line:
        return rank, self._members(i) if self.tagged else None

    def _members(self, i: Launched) -> tuple[int, ...]:
        if isinstance(i, tuple):
            return i[:1]
        tied = {self.stage_to_pp[stage] for stage in i.stages} if isinstance(i, ops.SyncTied) else self._ranks()
        return tuple(sorted(tied))

    def _ranks(self) -> range:
        return range(len(self.counters))

    def _is_there(self, rank: int, value: Value) -> bool:
        maker = self.programs[rank][self.made[rank][value]]
        if isinstance(maker, ops.ShareMetrics | ops.SyncTied):
            return maker in self.done
        return (
            self._is_sent(maker.peer, value)
            if isinstance(maker, ops.Recv) and not isinstance(maker, ops.LOANS)
            else True
        )

    def _is_met(self, rank: int, loan: ops.Message) -> bool:
        """Return whether the other end of a loan's message has come to it."""
        other = OTHER_END[type(loan)](loan.stage, loan.microbatch, rank)
        return self.counters[loan.peer] >= self.programs[loan.peer].index(other)

    def _is_sent(self, rank: int, value: Value) -> bool:
        if self.tagged:
            return self.counters[rank] > self.made[rank][value]
        taken = (value in uses.consumes for uses in self.flows[rank])
        at = next(k for k, takes in enumerate(taken) if takes and isinstance(self.programs[rank][k], ops.Send))
        return self.counters[rank] > at
