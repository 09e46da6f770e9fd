"""A load fills the tensors that an optimizer keeps, where these are memory by themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.optim.optimizer_state import KeptMemory

CPU = torch.device("cpu")
TAKEN = {
    "by itself": lambda kept, of: kept,
    "a transposed one": lambda kept, of: kept | {"a": torch.zeros(3, 2).t()},
    "the parameter": lambda kept, of: kept | {"a": of.detach()},
    "another key's": lambda kept, of: kept | {"b": kept["a"]},
    "part of another key's": lambda kept, of: kept | {"b": kept["a"][:1]},
    "of another type": lambda kept, of: kept | {"a": kept["a"].double()},
    "of another shape": lambda kept, of: kept | {"a": torch.zeros(3, 2)},
    "a parameter": lambda kept, of: kept | {"a": nn.Parameter(kept["a"])},
    "a number": lambda kept, of: kept | {"a": 1.0},
}


@pytest.mark.parametrize("case", TAKEN)
def test_only_a_tensor_that_is_alike_and_by_itself_is_taken(case: str) -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    state = TAKEN[case]({"a": torch.zeros(2, 3), "step": torch.tensor(1.0)}, parameter)
    before = state["a"]
    memory = KeptMemory(state, parameter)
    found = memory.take_tensor("a", (2, 3), torch.float32, CPU)
    assert not state
    assert (isinstance(before, Tensor) and found.data_ptr() == before.data_ptr()) == (case == "by itself")
    assert (found.shape, found.dtype, found.is_contiguous()) == ((2, 3), torch.float32, True)
    assert memory.take_tensor("a", (2, 3), torch.float32, CPU).data_ptr() != found.data_ptr(), "nothing is taken twice"


def files(engine: Engine, folder: Path) -> Callable[[], None]:
    save_file(engine.state_dict(), folder / "0.safetensors", metadata=engine.state_metadata())
    return lambda: engine.load_state_files([folder / "0.safetensors"])


def state(engine: Engine, folder: Path) -> Callable[[], None]:
    return partial(engine.load_state_dict, {name: tensor.clone() for name, tensor in engine.state_dict().items()})


def dcp(engine: Engine, folder: Path) -> Callable[[], None]:
    engine.save_dcp(folder / "saved")
    return partial(engine.load_dcp, folder / "saved")


@pytest.mark.parametrize("load", [state, files, dcp])
def test_a_load_puts_the_averages_of_adam_where_they_were(tmp_path: Path, load: Callable[..., Callable]) -> None:
    plan = qs.compile("1f1b", mesh="pp=1", microbatches=2)
    engine = Engine(plan, [nn.Linear(4, 3)], nn.MSELoss(), torch.optim.Adam)
    x, y = torch.randn(4, 4), torch.randn(4, 3)
    engine.step(x, y)
    expected = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    back = load(engine, tmp_path)
    engine.step(x, y)
    places = {name: tensor.data_ptr() for name, tensor in engine.state_dict().items() if ".exp_avg" in name}
    back()
    found = engine.state_dict()
    assert {name: found[name].data_ptr() for name in places} == places
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
