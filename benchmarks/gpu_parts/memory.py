"""Peak memory of a step by CUDA's allocator, beside the simulator's peak.

counted       torch.cuda.max_memory_allocated within a step, less the memory allocated before the engine
simulated     weights, gradients and optimizer as the engine holds them, and the plan's peak of activations, in bytes
              that autograd saves for a microbatch
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from paired import Target

from quintsched.runtime import Transport

from .model import MEDIUM, Size, alone, make_engine, share_of, sized

STEPS, MOST_APART = 3, 0.03
PLANS: tuple[tuple[str, int | None, int], ...] = (
    ("1f1b", None, 0),
    ("gpipe", None, 0),
    ("zb-h1", None, 0),
    ("gpipe", None, 1),
)
"""Schedule, chunks, and recomputation of blocks: 1 for all."""


def memory(device: torch.device, rounds: int) -> dict[str, Any]:
    """Print and return both peaks of a few plans on one rank; skipped where no allocator counts."""
    if device.type != "cuda":
        print("\nmemory: left out, no allocator counts on a CPU")
        return {}
    size = sized(MEDIUM, device)
    print(f"\npeak of a step, {size.title}, {size.microbatches} of them, in MiB")
    found = {}
    for schedule, chunks, recompute in PLANS:
        name = schedule + (", recomputed" if recompute else "")
        found[name] = peaks(size, schedule, chunks, alone(device), recompute=recompute)
        show(name, found[name])
    return found


def show(name: str, found: dict[str, float]) -> None:
    counted, simulated = found["counted"], found["simulated"]
    print(f"  {name:<24}counted {counted / 2**20:9.0f}   simulated {simulated / 2**20:9.0f}")
    print(Target("distance of the simulated from the counted", abs(simulated / counted - 1), MOST_APART), flush=True)


def peaks(
    size: Size, schedule: str, chunks: int | None, transport: Transport, pp: int = 1, recompute: int = 0
) -> dict[str, float]:
    """Return this rank's peak of a step by the allocator, and by the simulator, in bytes."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    plan = size.plan(schedule, chunks, pp, recompute=recompute)
    engine = make_engine(size, plan, transport)
    batch = size.batch(transport.device)
    given = share_of(engine, batch)
    before += sum(tensor.nbytes for tensor in batch)
    for _ in range(STEPS - 1):
        engine.step(*given)
    _, saved = engine.step_counting_saved(*given)
    costs = engine.saved_costs(saved)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    engine.step(*given)
    torch.cuda.synchronize()
    counted = torch.cuda.max_memory_allocated() - before
    held = engine.state_bytes()
    state = held.weights + held.gradients + held.optimizer
    activations = plan.simulate(costs).peak_activations[plan.mesh.pp_rank(transport.rank)]
    return {"counted": counted, "simulated": state + activations, "state": state, "activations": activations}
