"""Examples of docs/extending.md: a tensor-parallel layer, and an object that is saved, as on the page."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine, Transport, run_local
from quintsched.runtime.parallel.tensor.cuttable_layers import REGISTERED

from ..helpers.blocks import of_layers
from ..helpers.training import check_equality
from .trials import on_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
DATA = torch.randn(3, 2, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def code_of(title: str) -> str:
    """Return the code under a title, which begins with it."""
    (code,) = re.findall(rf"```python\n(# {title}\n.*?)```", PAGE, re.DOTALL)
    return code


def named_of_ours(code: str) -> list[str]:
    """Return the names that a piece of code imports of this package."""
    lines = re.findall(r"^from quintsched\S* import (.+)$", code, re.MULTILINE)
    return [name for line in lines for name in line.split(", ")]


Block = of_layers("Block", lambda: {"score": nn.Bilinear(4, 4, 4)}, lambda self, x: x + self.score(x, x.tanh()))
adam = partial(torch.optim.Adam, lr=1e-2)


def test_a_new_tensor_parallel_layer_trains_and_is_saved_as_the_whole_one() -> None:
    code, blocks, mesh = code_of("a tensor-parallel layer"), [Block, Block], "pp=2,tp=2"
    assert len(named_of_ours(code)) <= 10
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2)
    how: dict[str, Any] = {"rules": {"*.score": "column"}, "dtype": torch.float64}

    def facts(engine: Engine) -> tuple[str, list[torch.Size]]:
        engine.step(*DATA[0])
        parts = [tensor.shape for name, tensor in engine.state_dict().items() if name.endswith("score.weight")]
        return engine.tensor_cuts or "", parts

    try:
        exec(code, space := dict[str, Any]())
        check_equality(plan, blocks, nn.functional.mse_loss, adam, [*DATA], clip=0.1, tolerance=1e-10, **how)
        (cuts, parts), *_ = on_ranks(facts, blocks, nn.functional.mse_loss, mesh=mesh, **how)
    finally:
        REGISTERED.pop(nn.Bilinear, None)
    assert space["ColumnParallelBilinear"]
    assert parts == [torch.Size([2, 4, 4])]
    assert "cuts 4 of 4 weights" in cuts


def test_a_new_thing_is_saved_and_comes_back_on_another_mesh() -> None:
    code = code_of("a thing that is saved")
    assert not named_of_ours(code)
    exec(code, space := dict[str, Any]())
    curriculum = space["Curriculum"]

    def train(transport: Transport, mesh: str, state: dict[str, Tensor] | None) -> Any:
        plan, blocks = qs.compile("1f1b", mesh=mesh, microbatches=2), [curriculum(), curriculum()]
        engine = Engine(plan, blocks, nn.functional.mse_loss, adam, transport=transport)
        if state is not None:
            engine.load_full_state_dict(state)
            return [block.scale for block in blocks]
        for block in blocks:
            block.scale = 0.75
        engine.step(*DATA[0].float())
        return engine.full_state_dict()

    saved = run_local(2, lambda transport: train(transport, "dp=2", None))[0]
    assert run_local(2, lambda transport: train(transport, "pp=2", saved)) == [[0.75, 0.5], [0.5, 0.75]]
