"""The outputs of an evaluation: of all microbatches, whole over tp and cp, on the ranks of the last stage."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.blocks.block_builders import Blocks, build_model
from quintsched.runtime.comm import Transport, run_local

SIZE = 4


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.layer(x)
        loss = None if labels is None else ((logits - labels) ** 2).sum()
        return {"loss": loss, "logits": logits, "hidden": (x,), "words": "as they are", "rows": len(x)}


def own_loss(output: Mapping[str, Tensor], targets: object) -> tuple[Tensor, float]:
    return output["loss"], float(len(output["logits"]))


def evaluate(plan: qs.Plan, blocks: Blocks, loss_fn: Any, inputs: Any, targets: Any, **extras: Any) -> list[Any]:
    def run(transport: Transport) -> Any:
        sgd = partial(torch.optim.SGD, lr=0.1)
        engine = Engine(plan, blocks, loss_fn, sgd, dtype=torch.float64, transport=transport)
        replica, count = engine.replica, engine.num_replicas
        mine = {name: extra.chunk(count)[replica] for name, extra in extras.items()}
        return engine.evaluate(inputs.chunk(count)[replica], targets, outputs=True, **mine)

    return run_local(plan.mesh.size, run)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_outputs_of_all_microbatches_are_put_together(name: str) -> None:
    blocks: Blocks = [lambda: nn.Linear(SIZE, SIZE), nn.Tanh, lambda: nn.Linear(SIZE, SIZE), Head]
    x, y = torch.randn(8, SIZE, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    with torch.no_grad():
        whole = build_model(blocks, dtype=torch.float64)(x)
    results = evaluate(qs.compile(name, mesh="dp=2,pp=2", microbatches=4), blocks, own_loss, x, {}, labels=y)
    found = [result.outputs for result in results if result.outputs is not None]
    assert len(found) == 2
    assert all((output["words"], output["rows"]) == ("as they are", 1) for output in found)
    assert all(output["loss"].shape == (4,) for output in found)
    torch.testing.assert_close(torch.cat([output["logits"] for output in found]), whole["logits"])
    torch.testing.assert_close(torch.cat([output["hidden"][0] for output in found]), whole["hidden"][0])
    expected = float(((whole["logits"] - y) ** 2).sum()) / 8
    assert all(result.loss.item() == pytest.approx(expected) for result in results)
