"""Whether a step can be captured in a graph of the device (a CUDA graph), decided from the plan alone.

    Fwd … Bwd … ShareMetrics │ ClipGrad │ OptStep        one rank, nothing but computation before the norm: yes
    captured                 │ its sums │ by the host

What is captured runs in one launch, in which a watch knows no places: where a rank hung, nobody could say. So what
talks to other ranks is not captured. Nor is what the host does in between: memory that it keeps and frees, threads.
"""

from __future__ import annotations

from collections.abc import Iterator

from quintsched.ir.instructions import ClipGrad, FetchAct, GatherParams, OffloadAct, OptStep, Overlap
from quintsched.ir.plan_data import PlanData

_BY_HOST = {
    OffloadAct: "activations go to the host, which keeps and frees them (OffloadAct)",
    FetchAct: "activations come from the host, which keeps and frees them (FetchAct)",
    Overlap: "a forward and a backward run side by side, in two threads of the host (Overlap)",
    GatherParams: "weights are gathered and freed by the host (GatherParams)",
}


def capture_obstacles(plan: PlanData) -> list[str]:
    """Return why a step of the plan cannot be captured in a graph of the device, in words; nothing where it can."""
    return list(_obstacles(plan))


def _obstacles(plan: PlanData) -> Iterator[str]:
    if plan.mode != "train":
        yield f"it does not train (mode {plan.mode})"
    if plan.mesh.size > 1:
        yield f"its {plan.mesh.size} ranks ({plan.mesh}) wait for each other; in a graph, nothing says where one hangs"
    columns = plan.columns
    for kind, why in _BY_HOST.items():
        if len(columns.rows_where(kind)):
            yield why
    if plan.mode == "train" and plan.mesh.size == 1:
        kinds = [type(instruction) for instruction in plan.programs[0]]
        if kinds.count(ClipGrad) != 1 or set(kinds[kinds.index(ClipGrad) + 1 :]) - {OptStep}:
            yield "its steps do not end with one ClipGrad, and OptSteps behind it"
