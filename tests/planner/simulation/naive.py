"""A second simulator for the richest costs: exact, slow, on dictionaries. It reads costs files by itself.

Shares no code with the planner but the instructions: each rank walks its program, a computation begins when the one
before it has ended and what it takes from other ranks has come, a message when it is made and its channel is free.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from quintsched.ir import instruction_set as ops
from quintsched.plan import Plan

DEFAULTS = {"forward": 1, "backward_input": 1, "backward_weight": 1, "activation": 1, "message": 1}
INSTEAD = {"recompute": "forward", "exchange_backward": "exchange", "activation_after_input": "activation"}
UNDIVIDED = ("message",)

PURE = {
    **{ops.Fwd: ["forward"], ops.Recompute: ["recompute"], ops.Bwd: ["backward_input", "backward_weight"]},
    **{ops.BwdInput: ["backward_input"], ops.BwdWeight: ["backward_weight"]},
}
EXCHANGES = dict.fromkeys((ops.Fwd, ops.Recompute), "exchange")
EXCHANGES |= dict.fromkeys((ops.Bwd, ops.BwdInput), "exchange_backward")

Value = tuple[str, int, int]
"""An output or a gradient of a stage's output: "act" or "grad", stage, unit."""


@dataclass
class Naive:
    """A plan under a costs file, given as the object that it holds."""

    plan: Plan
    file: dict[str, Any]
    ends: dict[tuple[int, int], Fraction] = field(default_factory=dict)
    """End of the instruction of a rank at an index: computations, and both ends of messages."""
    made: dict[Value, Fraction] = field(default_factory=dict)
    arrived: dict[Value, Fraction] = field(default_factory=dict)

    def cost(self, name: str, stage: int, unit: int) -> Fraction:
        spec = self.plan.schedule
        while name in INSTEAD and name not in self.file:
            name = INSTEAD[name]
        given = self.file.get(name, DEFAULTS.get(name, 0))
        given = given if isinstance(given, dict) else {"stages": given}
        stages = given["stages"]
        parts = 1 if name in UNDIVIDED else spec.chunks * (1 if name == "keys" else spec.slices)
        value = Fraction(stages[stage]) if isinstance(stages, list) else Fraction(stages) / parts
        for kind, number in (("microbatches", unit // spec.slices), ("slices", unit % spec.slices)):
            factors = given.get(kind, self.file.get(kind))
            if factors is not None and (name, kind) != ("keys", "slices"):
                value *= Fraction(factors[number])
        return value

    def way(self, value: Value, source: int, destination: int) -> Fraction:
        size, p2p = self.cost("message", *value[1:]), self.file.get("p2p", 0)
        if not isinstance(p2p, dict):
            return Fraction(p2p) * size
        wire = p2p
        if "nodes" in p2p:
            same = p2p["nodes"][source] == p2p["nodes"][destination]
            wire = p2p.get("within" if same else "across", p2p)
        for ends in ((destination, source), (source, destination)):
            for link in p2p.get("links", []):
                if (link["source"], link["destination"]) == ends:
                    wire = link
        slow = size / Fraction(wire["bandwidth"]) if "bandwidth" in wire else Fraction(0)
        return Fraction(wire.get("latency", 0)) + slow

    def pure(self, i: ops.Instruction) -> Fraction:
        return sum((self.cost(n, s.stage, s.microbatch) for s in i.sides for n in PURE[type(s)]), Fraction(0))

    def exchange(self, i: ops.Instruction) -> Fraction:
        """Return the exchange time not hidden by computation; for an overlap, by neither side's."""
        if isinstance(i, ops.Overlap):
            forward, backward = i.sides
            apart = [self.pure(side) + self.exchange(side) for side in i.sides]
            return max(*apart, self.pure(forward) + self.pure(backward)) - self.pure(i)
        return self.cost(EXCHANGES[type(i)], i.stage, i.microbatch) if type(i) in EXCHANGES else Fraction(0)

    def neighbour(self, stage: int, unit: int, step: int) -> int | None:
        route = next(route for route in self.plan.routes if unit in route.microbatches).stages
        at = route.index(stage) + step
        return route[at] if 0 <= at < len(route) else None

    def taken(self, i: ops.Compute) -> Value | None:
        """Return the value that a computation takes from another stage."""
        if isinstance(i, ops.Fwd):
            before = self.neighbour(i.stage, i.microbatch, -1)
            return None if before is None else ("act", before, i.microbatch)
        if isinstance(i, ops.Bwd | ops.BwdInput) and self.neighbour(i.stage, i.microbatch, 1) is not None:
            return ("grad", i.stage, i.microbatch)
        return None

    def given(self, i: ops.Compute) -> Value | None:
        if isinstance(i, ops.Fwd):
            return ("act", i.stage, i.microbatch)
        if isinstance(i, ops.Bwd | ops.BwdInput):
            before = self.neighbour(i.stage, i.microbatch, -1)
            return None if before is None else ("grad", before, i.microbatch)
        return None

    def carried(self, i: ops.Message) -> Value:
        """Return the value of a message, named by the stage whose output, or gradient of the output, it is."""
        if "Act" in i.op:
            stage = i.stage if isinstance(i, ops.SendAct) else self.neighbour(i.stage, i.microbatch, -1)
            return ("act", stage, i.microbatch)
        stage = self.neighbour(i.stage, i.microbatch, -1) if isinstance(i, ops.Send) else i.stage
        return ("grad", stage, i.microbatch)

    def run(self) -> Naive:
        at, clock = defaultdict(int), defaultdict(Fraction)
        computed = [[(index, i) for index, i in enumerate(program) if i.computes] for program in self.plan.programs]
        sends: dict[tuple[int, int], list[Value]] = defaultdict(list)
        for rank, program in enumerate(self.plan.programs):
            for i in program:
                if isinstance(i, ops.Send):
                    sends[rank, i.peer].append(self.carried(i))
        free, moved = defaultdict(Fraction), True
        while moved:
            moved = False
            for rank, program in enumerate(computed):
                while at[rank] < len(program):
                    index, i = program[at[rank]]
                    ready = [self.ready(side, rank) for side in i.sides]
                    if None in ready:
                        break
                    clock[rank] = max(clock[rank], *ready) + self.pure(i) + self.exchange(i)
                    self.ends[rank, index] = clock[rank]
                    self.made |= dict.fromkeys(filter(None, map(self.given, i.sides)), clock[rank])
                    at[rank], moved = at[rank] + 1, True
            for channel, waiting in sends.items():
                while waiting and waiting[0] in self.made:
                    value = waiting.pop(0)
                    free[channel] = max(free[channel], self.made[value]) + self.way(value, *channel)
                    self.arrived[value], moved = free[channel], True
        assert not any(sends.values())
        for rank, program in enumerate(self.plan.programs):
            for index, i in enumerate(program):
                if isinstance(i, ops.Message):
                    self.ends[rank, index] = self.arrived[self.carried(i)]
        return self

    def ready(self, i: ops.Compute, rank: int) -> Fraction | None:
        value = self.taken(i)
        if value is None:
            return Fraction(0)
        other = value[1] if isinstance(i, ops.Fwd) else self.neighbour(i.stage, i.microbatch, 1)
        return (self.made if self.plan.stage_to_pp[other] == rank else self.arrived).get(value)

    def peaks(self) -> list[Fraction]:
        """The most activations on each rank, row by row; the rows of a plan in mode "forward" keep none."""
        return [self.peak(program) if self.plan.mode == "train" else Fraction(0) for program in self.plan.programs]

    def peak(self, program: list[Any]) -> Fraction:
        standing = most = Fraction(0)
        for i in program:
            if i.computes:
                changes = [self.change(side) for side in i.sides]
                most = max(most, standing + sum(change for change in changes if change > 0))
                standing += sum(changes)
        return most

    def change(self, i: ops.Compute) -> Fraction:
        """By how much a computation changes what its rank holds."""
        place = (i.stage, i.microbatch)
        names = ("activation", "activation_after_input", "activation_checkpointed")
        whole, after, kept = (self.cost(name, *place) for name in names)
        slices = self.plan.schedule.slices
        keys = self.cost("keys", *place) if slices > 1 and i.microbatch % slices == 0 else Fraction(0)
        again = bool(self.plan.recompute) and self.plan.recompute[i.stage] > 0
        chosen = self.plan.recompute_microbatches
        again = again and (not chosen or i.microbatch // slices in chosen[i.stage])
        changes = {ops.Fwd: (kept if again else whole) + keys, ops.Recompute: whole - kept}
        changes |= {ops.Bwd: -whole - keys, ops.BwdInput: after - whole - keys, ops.BwdWeight: -after}
        return changes[type(i)]
