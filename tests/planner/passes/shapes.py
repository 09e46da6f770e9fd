"""Training schedules, shapes that they take, and programs in letters."""

import quintsched as qs
from quintsched.ir.instruction_set import Message, short
from quintsched.plan import Plan
from quintsched.schedules import Schedule

TRAINING = [found for found in qs.all_schedules() if found.mode == "train"]


def shapes_of(schedule: Schedule) -> list[dict[str, int | str]]:
    """Some shapes that the schedule takes."""
    slices = min(3, schedule.max_slices)
    found = [
        {"mesh": mesh, "microbatches": microbatches, "slices": slices}
        for mesh, microbatches in (("pp=1", 3), ("pp=2", 4), ("dp=2,pp=2", 8), ("pp=3", 6), ("pp=4", 8))
    ]
    return [shape for shape in found if takes(schedule, shape)]


def takes(schedule: Schedule, shape: dict[str, int | str]) -> bool:
    try:
        return bool(qs.compile(schedule, **shape).programs)
    except qs.UsageError:
        return False


def cells(plan: Plan, rank: int) -> str:
    return " ".join(short(i) for i in plan.programs[rank] if not isinstance(i, Message))
