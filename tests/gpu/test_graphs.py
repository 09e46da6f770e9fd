"""Steps from CUDA graphs: the bits of steps by instructions, and what a graph cannot hold.

How the host is led past a captured step, `tests/runtime/interpreter/test_step_graphs.py` asks on a CPU.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import quintsched as qs
from quintsched.runtime.engine import Engine
from tests.runtime.toys import ids_task, tiny_gpt

from .machine import Machine
from .tiny_engines import LENGTH, SAMPLES, engine_of

pytestmark = pytest.mark.ranks(1)

STEPS = 12
PLANS: dict[str, dict[str, Any]] = {
    **{"1f1b": {}, "gpipe": {"microbatches": 8}, "zb-h1": {"recompute": 1}, "seq-1f1b": {"slices": 2}},
    **{name: {"chunks": 2} for name in ("interleaved-1f1b", "interleaved-zb", "zbv")},
}


def engine(machine: Machine, schedule: str = "1f1b", blocks: Any = None, **more: Any) -> Engine:
    plan = qs.compile(**{"schedule": schedule, "mesh": "pp=1", "microbatches": 4, **PLANS[schedule]})
    torch.manual_seed(0)
    return engine_of(machine.alone(), plan, more.pop("dtype", torch.float32), blocks, **more)


def trained(engine: Engine, steps: int = STEPS) -> list[Tensor]:
    """Return the loss and the norm of each step, read behind the last, and then all weights."""
    with sdpa_kernel(SDPBackend.MATH):  # the faster kernels add up in an order that changes from run to run
        results = [engine.step(*batch) for batch in ids_task(steps, SAMPLES, LENGTH).batches]
    return [*(torch.stack([r.loss, r.grad_norm]) for r in results), *engine.full_weights().values()]


def require_same(machine: Machine, **settings: Any) -> None:
    machine.require_cuda("graphs")
    found, expected = (trained(engine(machine, cuda_graph=captured, **settings)) for captured in (True, False))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("schedule", PLANS)
def test_steps_from_graphs_have_the_same_bits(machine: Machine, schedule: str) -> None:
    require_same(machine, schedule=schedule)


@pytest.mark.parametrize("option", [{"dtype": torch.bfloat16}, {"clip": 0.1}, {"bucket_mb": 1e-3}], ids=str)
def test_options(machine: Machine, option: dict[str, Any]) -> None:
    require_same(machine, **option)


def test_compiled_stages(machine: Machine) -> None:
    require_same(machine, compiled=True)


class Asking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.is_meta or x.sum().item() < 1e9 else x * 2


def test_a_block_that_asks_the_device_is_named(machine: Machine) -> None:
    machine.require_cuda("graphs")
    blocks = tiny_gpt(LENGTH)
    captured = engine(machine, blocks=[*blocks[:2], Asking, *blocks[2:]], cuda_graph=True)
    with pytest.raises(qs.UsageError, match=r"step 3 cannot be captured: .*block 2 \(Asking\)"):
        trained(captured)
    assert len(trained(engine(machine))) > STEPS, "the device goes on"


def test_a_device_without_graphs_says_so(machine: Machine) -> None:
    if machine.device == "cuda":
        assert engine(machine, cuda_graph=True)
        return
    with pytest.raises(qs.MisfitError, match="cuda_graph wants a CUDA device"):
        engine(machine, cuda_graph=True)
