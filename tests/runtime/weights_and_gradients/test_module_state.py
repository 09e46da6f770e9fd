"""Module state beside parameters and buffers is saved and loaded; unsupported state is refused at the start."""

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine, Transport, run_local

from ..trials import require_resumable, save_files

STEPS = 4
INPUTS = torch.randn(STEPS, 8, 6, generator=torch.Generator().manual_seed(1))


class Plain(nn.Module):
    """Its weights count less the more often it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.calls = nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.mix(x) * (1 + 0.1 * self.calls)


class Extra(Plain):
    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "name": "extra", "past": [torch.full((2,), self.calls)]}

    def set_extra_state(self, state: Any) -> None:
        assert type(state["calls"]) is int
        assert state["past"][0].tolist() == [state["calls"]] * 2
        self.calls = state["calls"]


class Own(Plain):
    """Saves and loads more by itself."""

    def _save_to_state_dict(self, found: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(found, prefix, keep_vars)
        found[f"{prefix}calls"] = torch.tensor(self.calls)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.calls = int(state.pop(f"{prefix}calls"))
        super()._load_from_state_dict(state, prefix, *rest)


def nested(kind: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Tanh(), kind())


class Tied(Plain):
    """Two of its weights are one, one lies across, and a buffer has one number in many places."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.across = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6).t())
        self.other.weight = self.mix.weight
        self.register_buffer("ones", torch.ones(1).expand(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) + self.other(x) @ self.across + self.ones


def make(kind: Any, mesh: str = "dp=1", transport: Transport | None = None, **more: Any) -> Engine:
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2)
    blocks = [partial(nested, kind), partial(nn.Linear, 6, 6)]
    optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    return Engine(plan, blocks, nn.MSELoss(), optimizer, transport=transport, **more)


def train(engine: Engine, steps: range) -> None:
    for step in steps:
        x = INPUTS[step, engine.replica :: engine.num_replicas]
        engine.step(x, x)


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("kind", [Extra, Own, Tied])
def test_a_resumed_run_is_the_unbroken_one(kind: Any, tmp_path: Path) -> None:
    require_resumable(partial(make, kind), train, range(2), range(2, 4), tmp_path)


class Opaque(Extra):
    def get_extra_state(self) -> Any:
        return io.BytesIO()


class NoWay(Plain):
    def get_extra_state(self) -> Any:
        return 1


class OneWay(Own):
    _load_from_state_dict = nn.Module._load_from_state_dict


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Opaque, "cannot be saved exactly: it is a _io.BytesIO"),
        (NoWay, "get_extra_state without set_extra_state"),
        (OneWay, "no module takes it back"),
        (partial(nn.LazyLinear, 6), "no shape before the first forward"),
    ],
)
def test_what_cannot_be_saved_is_refused_when_the_engine_is_made(kind: Any, words: str) -> None:
    with pytest.raises(qs.MisfitError, match=words):
        make(kind)


@pytest.mark.parametrize("mesh", ["dp=2", "pp=2", "tp=2"])
def test_what_a_module_counts_goes_to_another_mesh(mesh: str, tmp_path: Path) -> None:
    def run(transport: Transport) -> None:
        engine = make(Extra, mesh, transport)
        train(engine, range(2))
        save_files(engine, tmp_path)

    run_local(2, run, timeout_s=60)
    engine = make(Extra)
    engine.load_state_files(sorted(tmp_path.iterdir()))
    assert engine.stages[0].get_submodule("blocks.0.1").calls == 4
