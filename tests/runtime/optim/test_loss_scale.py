"""Scaled losses give the numbers of a plain loop with torch's GradScaler; the scale moves on all ranks alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.blocks.block_builders import build_model
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.optim.loss_scale import LossScale

from ..toys import difference, share

INIT = {"init_scale": 2.0**12, "growth_interval": 2}


def blocks() -> list[type[nn.Module]]:
    return [lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4)]  # type: ignore[list-item, return-value]


def squared(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().sum()


def batches() -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    found = [torch.randn(2, 4, 4, generator=random) for _ in range(7)]
    found[3][0, 1, 2] = torch.inf
    return [(pair[0], pair[1]) for pair in found]


def alone() -> tuple[dict[str, Tensor], list[float]]:
    model, scaler, scales = build_model(blocks(), 0), torch.amp.GradScaler("cpu", **INIT), []
    stepper = torch.optim.Adam(model.parameters(), lr=0.01)
    for inputs, targets in batches():
        stepper.zero_grad()
        for x, y in zip(inputs.split(1), targets.split(1), strict=True):
            scaler.scale(squared(model(x), y) / 4).backward()
        scaler.unscale_(stepper)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(stepper)
        scaler.update()
        scales.append(scaler.get_scale())
    return {name: p.detach() for name, p in model.named_parameters()}, scales


def test_a_scale_grows_no_further_than_torchs() -> None:
    scale = LossScale(torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1))
    scale.update(skipped=False)
    assert scale.value == 2.0**127


@pytest.mark.parametrize(("mesh", "zero"), [("dp=2,pp=2", 0), ("dp=2", 2), ("pp=2", 0)])
def test_scaled_steps_equal_a_plain_loop(mesh: str, zero: int) -> None:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=4 // qs.Mesh.parse(mesh).axis_size("dp"), zero=zero)

    def run(transport: Transport) -> tuple[dict[str, Tensor], list[float]]:
        scaler, scales = torch.amp.GradScaler("cpu", **INIT), []
        engine = Engine(
            plan,
            blocks(),
            squared,
            lambda p: torch.optim.Adam(p, lr=0.01),
            clip=1.0,
            grad_scaler=scaler,
            transport=transport,
        )
        for number, (inputs, targets) in enumerate(batches()):
            result = engine.step(*share(engine, inputs, targets))
            assert result.skipped == (number == 3)
            assert result.loss.isfinite() == (number != 3)
            scales.append(scaler.get_scale())
        other = Engine(plan, blocks(), squared, torch.optim.Adam, grad_scaler=scaler, transport=transport)
        state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        other.step(*share(other, *batches()[3]))
        other.load_state_dict(state)
        assert scaler.get_scale() == scales[-1]
        return engine.full_weights(), scales

    expected, scales = alone()
    assert len(set(scales)) == 2
    for weights, found in run_local(qs.Mesh.parse(mesh).size, run):
        assert found == scales
        assert max(difference(weight, expected[name]) for name, weight in weights.items()) <= 1e-6
