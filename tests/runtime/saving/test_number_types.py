"""Numbers of every type come back from every command as they were, and stand for no numbers of another kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import quintsched as qs
from quintsched.errors import MisfitError, UsageError
from quintsched.runtime import Engine
from quintsched.runtime.blocks.dtype_names import TYPES
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.saving.checkpoints.save_and_load_checkpoints import Checkpoints

from .offline_command import main

INPUTS, TARGETS = torch.ones(4, 6), torch.ones(4, 6)


class Odd(nn.Module):
    """Has a buffer of each type, and a word of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.word = "at first"
        for name, dtype in TYPES.items():
            self.register_buffer(name.lower(), torch.arange(1, 7).to(torch.float32).to(dtype))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + 1

    def get_extra_state(self) -> str:
        return self.word

    def set_extra_state(self, state: str) -> None:
        self.word = state


def engine_of(transport: Transport, middle: Callable[[], nn.Module] = Odd, size: int = 1) -> Engine:
    plan = qs.compile("1f1b", mesh=f"pp={size}", microbatches=2)
    blocks = [partial(nn.Linear, 6, 6), middle, partial(nn.Linear, 6, 6)]
    optimizer = partial(torch.optim.AdamW, lr=0.1)
    return Engine(plan, blocks, nn.MSELoss(), optimizer, transport=transport)


def save(folder: Path, size: int = 1) -> dict[str, Tensor]:
    def body(transport: Transport) -> dict[str, Tensor]:
        engine = engine_of(transport, size=size)
        engine.step(INPUTS, TARGETS)
        with Checkpoints(folder, 2).opened(engine.saves) as saves:
            saves.save_step(1, {"epoch": 1, "batch": 1})
        return engine.full_state_dict(all_blocks=True)

    return weights_of(run_local(size, body, timeout_s=60)[0])


def resume(folder: Path, size: int = 1) -> dict[str, Tensor]:
    def body(transport: Transport) -> dict[str, Tensor]:
        engine = engine_of(transport, size=size)
        with Checkpoints(folder, 2).opened(engine.saves, "resume") as saves:
            found = saves.newest_whole()
            assert found is not None
            found.load_step()
        return engine.full_state_dict(all_blocks=True)

    return weights_of(run_local(size, body, timeout_s=60)[0])


def weights_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in state.items() if name.startswith("model.")}


def require_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_every_type_comes_back_from_every_command(tmp_path: Path) -> None:
    state = save(tmp_path / "out", 2)
    assert {tensor.dtype for tensor in state.values()} == set(TYPES.values())
    one = tmp_path / "one.safetensors"
    assert main(["export", str(tmp_path / "out"), "--output", str(one)]) == 0
    require_same(load_file(one), state)
    assert main(["import", str(one), "--output", str(tmp_path / "begin")]) == 0
    require_same(resume(tmp_path / "begin"), state)
    assert main(["reshard", str(tmp_path / "out"), "--mesh", "pp=3", "--output", str(tmp_path / "cut")]) == 0
    require_same(resume(tmp_path / "cut", 3), state)

    def through_folders(transport: Transport) -> dict[str, Tensor]:
        engine = engine_of(transport)
        engine.load_pretrained(one)
        engine.save_pretrained(tmp_path / "pretrained")
        engine.save_dcp(tmp_path / "dcp")
        again = engine_of(transport)
        again.load_dcp(tmp_path / "dcp")
        return again.full_state_dict()

    require_same(weights_of(run_local(1, through_folders)[0]), state)
    require_same(load_file(tmp_path / "pretrained" / "model.safetensors"), state)


class Doubly(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("wide", torch.ones(2, dtype=torch.complex128))


def test_a_type_that_no_file_has_is_refused_by_name(tmp_path: Path) -> None:
    def body(transport: Transport) -> None:
        engine = engine_of(transport, Doubly)
        with pytest.raises(UsageError, match="format: dcp"), Checkpoints(tmp_path, keep=1).opened(engine.saves):
            pass
        engine.save_pretrained(tmp_path / "out")

    with pytest.raises(UsageError, match=r"1\.wide is torch\.complex128, which a checkpoint cannot hold"):
        run_local(1, body)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64])
def test_numbers_of_another_kind_are_no_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    good = save(tmp_path / "out")
    bad = {**good, "0.weight": good["0.weight"].to(dtype)}
    one = tmp_path / "one.safetensors"
    save_file(bad, one)
    assert main(["import", str(one), "--output", str(tmp_path / "begin")]) == 0
    full = {f"model.{name}": tensor for name, tensor in bad.items()}

    def with_extra(engine: Engine) -> dict[str, Tensor]:
        return {**engine.full_state_dict(), **full}

    loads: list[Callable[[Engine], Any]] = [
        lambda engine: engine.load_pretrained(one),
        lambda engine: engine.load_state_files([tmp_path / "begin" / "step-00000000" / "rank-00000.safetensors"]),
        lambda engine: engine.load_full_state_dict(with_extra(engine)),
        lambda engine: engine.set_weights({"0.weight": bad["0.weight"]}),
        lambda engine: engine.load_dcp(torch_checkpoint(tmp_path / "dcp", full)),
    ]
    for load in loads:
        with pytest.raises(MisfitError, match=rf"0\.weight' has numbers of {dtype}"):
            run_local(1, lambda transport, load=load: load(engine_of(transport)))  # type: ignore[misc]


def torch_checkpoint(folder: Path, state: dict[str, Tensor]) -> Path:
    dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    return folder
