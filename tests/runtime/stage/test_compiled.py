"""Stages through torch.compile give the numbers of one process, split backwards and recomputation included."""

import os
import shutil
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from quintsched.runtime import Engine

from ..grid import Case, require_equality
from ..trials import on_ranks

COMPILER = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
"""Compiler that torch looks for."""
NEEDS_COMPILER = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason=f"torch.compile needs {COMPILER}, which is not there"
)
pytestmark = [  # torch's own compiler
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
slow = [pytest.mark.slow, NEEDS_COMPILER]


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        (Case("zb-h1", "pp=1", model="own"), "aot_eager"),
        pytest.param(Case("zb-h1", "pp=2", model="own"), "inductor", marks=slow),
        pytest.param(Case("1f1b", "dp=2", model="own", zero=3, recompute=1), "inductor", marks=slow),
        pytest.param(Case("zb-h1", "ep=2,dp=2", 2, "llama"), "inductor", marks=slow),
    ],
    ids=str,
)
def test_compiled_stages_equal_one_process(case: Case, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every day without the machine's compiler, which takes a quarter of a minute: torch traces and splits alike."""
    torch._dynamo.reset()  # cases before this one have compiled these blocks' code
    counted = CompileCounterWithBackend(backend)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counted))
    require_equality(case, compiled=False)
    assert counted.frame_count == 0
    require_equality(case, compiled=True)
    assert counted.frame_count > 0


@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_as_many_weight_gradients_are_deferred(schedule: str) -> None:
    def share(engine: Engine) -> float | None:
        return engine.deferred_share

    blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)]
    compiled, plain = (
        on_ranks(share, blocks, schedule=schedule, compiled=is_compiled) for is_compiled in (True, False)
    )
    assert compiled == plain
    assert all(one is None if schedule == "1f1b" else one is not None and one > 0.9 for one in plain)
