"""Examples of docs/extending.md: a tensor-parallel layer, and an object that is saved, as on the page."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.runtime import Engine, Transport, run_local
from quintsched.runtime.parallel.tensor.cuttable_layers import REGISTERED

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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Bilinear(4, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.score(x, x.tanh())


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def test_a_new_tensor_parallel_layer_trains_and_is_saved_as_the_whole_one() -> None:
    code = code_of("a tensor-parallel layer")
    assert len(named_of_ours(code)) <= 10
    plan = qs.compile("1f1b", mesh="pp=2,tp=2", microbatches=2)

    def rank(transport: Transport) -> tuple[list[float], dict[str, Tensor], str, list[torch.Size]]:
        blocks = [Block, Block]
        rules = {"*.score": "column"}
        engine = Engine(plan, blocks, F.mse_loss, adam, dtype=torch.float64, clip=0.1, rules=rules, transport=transport)
        losses = [float(engine.step(*both).loss) for both in DATA]
        parts = [tensor.shape for name, tensor in engine.state_dict().items() if name.endswith("score.weight")]
        return losses, engine.full_weights(), engine.tensor_cuts or "", parts

    try:
        exec(code, space := dict[str, Any]())
        ran = run_local(4, rank)
    finally:
        REGISTERED.pop(nn.Bilinear, None)
    assert space["ColumnParallelBilinear"]
    (losses, weights, cuts, parts), last = ran[0], ran[-1]
    assert parts == [torch.Size([2, 4, 4])]
    assert "cuts 4 of 4 weights" in cuts
    single = run_local(1, lambda transport: alone(transport))[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(single[0]), rtol=1e-10, atol=0)
    torch.testing.assert_close({**weights, **last[1]}, single[1], rtol=1e-9, atol=1e-12)


def alone(transport: Transport) -> tuple[list[float], dict[str, Tensor]]:
    """Train the same whole."""
    plan = qs.compile("1f1b", mesh="dp=1", microbatches=2)
    engine = Engine(plan, [Block, Block], F.mse_loss, adam, dtype=torch.float64, clip=0.1, transport=transport)
    return [float(engine.step(*both).loss) for both in DATA], engine.full_weights()


def test_a_new_thing_is_saved_and_comes_back_on_another_mesh() -> None:
    code = code_of("a thing that is saved")
    assert not named_of_ours(code)
    exec(code, space := dict[str, Any]())
    curriculum = space["Curriculum"]

    def train(transport: Transport, mesh: str, state: dict[str, Tensor] | None) -> Any:
        plan, blocks = qs.compile("1f1b", mesh=mesh, microbatches=2), [curriculum(), curriculum()]
        engine = Engine(plan, blocks, F.mse_loss, adam, transport=transport)
        if state is not None:
            engine.load_full_state_dict(state)
            return [block.scale for block in blocks]
        for block in blocks:
            block.scale = 0.75
        engine.step(*DATA[0].float())
        return engine.full_state_dict()

    saved = run_local(2, lambda transport: train(transport, "dp=2", None))[0]
    assert run_local(2, lambda transport: train(transport, "pp=2", saved)) == [[0.75, 0.5], [0.5, 0.75]]
