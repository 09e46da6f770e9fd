"""A second opinion on times and memory: the longest path, found by asking each instruction when its inputs are there.

Shares no code with the planner but the instructions. Only for one route 0, 1, 2, … and full backwards.
"""

from fractions import Fraction

from quintsched.ir.instruction_set import Bwd, Fwd
from quintsched.plan import Plan

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
