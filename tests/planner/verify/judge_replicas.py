"""Judge of a plan's head about its replicas: the state that they shard, and the way they sum gradients."""

from math import prod

from quintsched.ir.instruction_set import AllGatherBucket, AllReduceBucket, ReduceScatterBucket
from quintsched.plan import Plan


def zero_faults(plan: Plan, sizes: dict[str, int], trains: bool) -> list[str]:
    """Say what cannot be shared out over replicas as the head has it."""
    stage, every = plan.zero.stage, plan.zero.every
    replicas = any(sizes.get(axis, 1) > 1 for axis in ("dp", "cp", "ep"))
    fine = 0 <= stage <= 3 and every >= 1 and (every == 1 or (stage >= 2 and trains))
    fine = fine and (stage == 0 or replicas) and (trains or stage in (0, 3))
    return [] if fine else ["nothing can be shared out like this"]


def communication_faults(plan: Plan, sizes: dict[str, int]) -> list[str]:
    """Every sum over replicas has to have its own collective, in the plan's way."""
    kinds = {AllReduceBucket: "all_reduce", ReduceScatterBucket: "reduce_scatter", AllGatherBucket: "all_gather"}
    sums = [i for program in plan.programs for i in program if type(i) in kinds]
    called = {(kinds[type(i)], prod(sizes.get(axis, 1) for axis in i.axes)) for i in sums}
    means, plans = plan.communication.means, plan.communication.plans.values()
    there = {(mini.kind, mini.size) for mini in plans}
    found = ["calls and collectives are not the same"] if means != "native" and called != there else []
    found += ["native is spelled out"] if means == "native" and plans else []
    if means in ("ring", "tree") and any(mini.algorithm != means for mini in plans):
        found.append("something is spelled out in another way")
    return found
