"""Check, from the plan alone, whether a step can be captured in a CUDA graph.

    Fwd … Bwd … ShareMetrics │ ClipGrad │ OptStep        one rank, only computation before the norm: yes
    captured                 │ its sums │ by the host

A captured graph is one launch, within which a watchdog sees no instructions: if a rank hung there, its place would be
unknown. So communication with other ranks is not captured. Nor is work of the host: memory management, threads.
"""

from __future__ import annotations

from collections.abc import Iterator

from quintsched.ir.instruction_set import ClipGrad, FetchAct, GatherParams, OffloadAct, OptStep, Overlap
from quintsched.ir.plan_data import PlanData

_BY_HOST = {
    OffloadAct: "activations go to the host, which keeps and frees them (OffloadAct)",
    FetchAct: "activations come from the host, which keeps and frees them (FetchAct)",
    Overlap: "a forward and a backward run side by side, in two threads of the host (Overlap)",
    GatherParams: "weights are gathered and freed by the host (GatherParams)",
}


def capture_obstacles(plan: PlanData) -> list[str]:
    """Return the reasons why a step of the plan cannot be captured in a CUDA graph; [] if it can."""
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
