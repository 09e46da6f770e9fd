"""Stages through torch.compile give the numbers of those that are not, split backwards and recomputation included."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import quintsched as qs
from quintsched.runtime import Engine, Transport, run_local
from tests.compiling import NEEDS_COMPILER, TORCH_WARNS

from ...helpers.blocks import of_layers
from ..toys import difference, sgd

pytestmark = TORCH_WARNS
slow = [pytest.mark.slow, NEEDS_COMPILER]


Mlp = of_layers(
    "Mlp",
    lambda: {"norm": nn.LayerNorm(8), "wide": nn.Linear(8, 16), "narrow": nn.Linear(16, 8)},
    lambda self, x: x + self.narrow(nn.functional.gelu(self.wide(self.norm(x)))) * 0.5,
)


@pytest.mark.parametrize(
    ("schedule", "more", "backend"),
    [
        ("zb-h1", {"mesh": "pp=1"}, "aot_eager"),
        pytest.param("zb-h1", {"mesh": "pp=2"}, "inductor", marks=slow),
        pytest.param("1f1b", {"mesh": "dp=2", "zero": 3, "recompute": 1}, "inductor", marks=slow),
    ],
    ids=str,
)
def test_compiled_stages_equal_plain_ones(schedule, more, backend, monkeypatch):
    """Every day without the machine's compiler, which takes a quarter of a minute: torch traces and splits alike."""
    torch._dynamo.reset()  # cases before this one have compiled these blocks' code
    counted = CompileCounterWithBackend(backend)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counted))
    plan = qs.compile(schedule, microbatches=4, **more)
    inputs, targets = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)

    def outcome(compiled: bool) -> list[tuple[float, dict[str, Tensor], float | None]]:
        def run(transport: Transport) -> tuple[float, dict[str, Tensor], float | None]:
            told: dict[str, Any] = {"dtype": torch.float64, "compiled": compiled, "transport": transport}
            engine = Engine(plan, [Mlp] * max(2, len(plan.stage_to_pp)), nn.functional.mse_loss, sgd, **told)
            loss = [engine.step(inputs, targets).loss.item() for _ in range(3)][-1]
            engine.evaluate(inputs, targets)
            return loss, engine.full_weights(), engine.deferred_share

        return run_local(plan.mesh.size, run, timeout_s=300)

    of_plain, before = outcome(False), counted.frame_count
    of_compiled = outcome(True)
    assert before == 0 < counted.frame_count
    for (loss, weights, share), (expected_loss, expected, plain_share) in zip(of_compiled, of_plain, strict=True):
        assert loss == pytest.approx(expected_loss, abs=1e-12)
        assert all(difference(weight, expected[name]) <= 1e-12 for name, weight in weights.items())
        assert share == plain_share
        assert share is None if schedule == "1f1b" else share is not None and share > 0.9
