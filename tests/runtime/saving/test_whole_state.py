"""Every entry of a model's own state dict is in what an engine gives and saves, and is read back into the forward."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.runtime import Engine, split

from ..splitting.models import Traced, Walked, inputs, loss, made
from .split_models import plan_of, require_same, run_engines

WIDTH = 8


def read_between(self: Any, x: Tensor) -> Tensor:
    """Read buffers of the whole model; its teacher is read by nothing."""
    return x * (1 + self.mean) + self.steps + self.passing


@pytest.mark.parametrize(("mesh", "kind"), [("dp=1", Traced), ("pp=2", Walked)])
def test_all_of_it_goes_and_comes_back(tmp_path: Path, kind: type[nn.Module], mesh: str) -> None:
    def model(steps: int) -> nn.Module:
        whole = made(kind, read_between, torch.float32)
        whole.register_buffer("passing", torch.ones(1), persistent=False)
        whole.steps.fill_(steps)
        return whole

    kept, other, x = list[nn.Module](), model(3), inputs(torch.float32)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor += 1
    wanted = other.state_dict()
    save_file(wanted, tmp_path / "model.safetensors")

    def blocks() -> Any:
        kept.append(model(0))  # or buffers that are loaded would not be found
        return split(kept[-1], example=x if kind is Walked else None)

    def body(engine: Engine) -> tuple[float, dict[str, Tensor]]:
        engine.load_pretrained(tmp_path)
        result = engine.step(x, x[:, 0, 0])
        engine.save_pretrained(tmp_path / "out")
        engine.save_dcp(tmp_path / "dcp")
        return float(result.loss), engine.full_weights()

    ranks = run_engines(plan_of(mesh, 0), blocks, body, loss, optimizer=partial(torch.optim.SGD, lr=0.0))
    own = blocks().own_names
    given = {own[name]: tensor for _, weights in ranks for name, tensor in weights.items()}
    read = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in wanted.items()}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(read, checkpoint_id=tmp_path / "dcp", no_dist=True)
    back = {name.removeprefix("model."): tensor for name, tensor in read.items()}
    saved = {name: t for file in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(file).items()}
    for found in (given, saved, back):
        require_same(found, wanted)
    total, weight = loss(other(x), x[:, 0, 0])
    assert ranks[0][0] == pytest.approx(float(total) / weight, rel=1e-5)


class Scaled(nn.Linear):
    """A layer with a weight that has no dimensions, and one that has no numbers."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scale, self.none = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.none.sum(0)


X, Y = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("zero", [1, 3])
def test_weights_without_dimensions_or_numbers_go_on_under_zero(zero: int) -> None:
    def body(engine: Engine) -> list[float]:
        losses = []
        engine.step(X, Y)
        state = engine.full_state_dict()
        for _ in range(2):
            losses.append(engine.step(X, Y).loss.item())
            engine.load_full_state_dict(state)
        assert state["model.1.none"].shape == (0, WIDTH)
        return losses

    for first, again in run_engines(plan_of("dp=2", zero), lambda: [Scaled, Scaled], body, F.mse_loss):
        assert first == again


def test_weights_that_the_loop_assigns_are_saved_before_the_next_step_too_or_refused() -> None:
    def body(engine: Engine) -> bool:
        engine.step(X, Y)
        engine.stages[0].blocks["0"].weight.data = torch.full((WIDTH, WIDTH), 7.0)
        return bool((engine.full_state_dict()["model.0.weight"] == 7.0).all())

    def assigned(zero: int) -> list[bool]:
        return run_engines(plan_of("dp=2", zero), lambda: [nn.Linear(WIDTH, WIDTH)], body, F.mse_loss)

    assert assigned(1) == [True, True]
    with pytest.raises(qs.UsageError, match=r"such as '0\.weight' .*, but what is stepped are .* shards"):
        assigned(3)
