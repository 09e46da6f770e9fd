"""Judge of a plan's head: indices out of range, sizes that do not fit, routes through another model."""

from math import prod

from quintsched.ir.instruction_set import AllGatherBucket, AllReduceBucket, ReduceScatterBucket
from quintsched.plan import Plan
from tests.planner.verify.skip_judge import skip_head_faults


def head_faults(plan: Plan) -> list[str]:
    """Say what of a plan's head names nothing, does not fit, or is another model than the one to be trained."""
    found, sizes = [], dict(plan.mesh.axes)
    pp, stages, trains = sizes.get("pp", 1), len(plan.stage_to_pp), plan.mode == "train"
    units = plan.schedule.microbatches * plan.schedule.slices
    if min(plan.schedule.microbatches, plan.schedule.slices, plan.buckets_per_stage) < 1:
        found.append("there is less than one of something")
    if len(plan.programs) != pp or not all(0 <= home < pp for home in plan.stage_to_pp):
        found.append("programs and stages do not fit the ranks")
    if sorted(unit for route in plan.routes for unit in route.microbatches) != list(range(units)):
        found.append("not every microbatch has one route")
    pieces = range(stages) if plan.stage_to_part is None else plan.stage_to_part
    model = list(range(len(set(pieces))))
    if len(pieces) != stages:
        return ["the pieces of the model do not fit the stages"]
    if any(not set(route.stages) <= set(range(stages)) for route in plan.routes):
        return ["a route goes where no stage is"]
    if any([pieces[stage] for stage in route.stages] != model for route in plan.routes):
        found.append("a route does not see the model")
    if {stage for route in plan.routes for stage in route.stages} != set(range(stages)):
        found.append("a stage is on no route")
    if len(set(zip(pieces, plan.stage_to_pp, strict=True))) < stages:
        found.append("twins are on one rank")
    if (plan.recompute and len(plan.recompute) != stages) or min(plan.recompute, default=0) < 0:
        found.append("recompute does not fit the stages")
    if any(plan.recompute) and not trains:
        found.append("there is nothing to recompute for")
    for stage, chosen in enumerate(plan.recompute_microbatches):
        units = [unit for route in plan.routes if stage in route.stages for unit in route.microbatches]
        here = {unit // max(plan.schedule.slices, 1) for unit in units}
        if sorted({*chosen} & here) != [*chosen] or any(plan.recompute[stage : stage + 1]) != bool(chosen):
            found.append("a stage recomputes microbatches that it cannot, or names none")
    if plan.recompute_microbatches and (len(plan.recompute_microbatches) != stages or not any(plan.recompute)):
        found.append("recomputed microbatches do not fit the stages")
    for held in plan.tied.values():
        if plan.stage_to_part is not None or len(held) < 2 or list(held) != sorted(set(held)):
            found.append("a weight is tied wrongly")
        elif not any(set(held) <= set(route.stages) for route in plan.routes):
            found.append("no microbatch sees all that is tied")
    if plan.losses:
        visited = plan.routes[0].stages if plan.routes else ()
        on_route = [stage for stage in visited if stage in plan.losses]
        if len(plan.routes) > 1 or on_route != [*plan.losses] or on_route[-1:] != [*visited[-1:]]:
            found.append("a loss is not where one can be")
        if any(plan.blocks_per_stage[stage : stage + 1] == (0,) for stage in plan.losses[:-1] if stage >= 0):
            found.append("a loss is where nothing is computed")
    counts = {(piece, blocks) for piece, blocks in zip(pieces, plan.blocks_per_stage, strict=False)}
    if plan.blocks_per_stage and (len(plan.blocks_per_stage) != stages or min(plan.blocks_per_stage) < 0):
        found.append("the blocks do not fit the stages")
    elif plan.blocks_per_stage and (len(counts) > len(model) or (0, 0) in counts):
        found.append("a piece has other blocks elsewhere, or the first one none")
    found += skip_head_faults(plan)
    return found + zero_faults(plan, sizes, trains) + communication_faults(plan, sizes)


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
