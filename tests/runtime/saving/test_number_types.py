"""Numbers of every type are written and read as they were, by every command, and stand for no others."""

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
from quintsched.runtime.saving import lazy_tensors, write_tensors
from quintsched.runtime.saving.checkpoints.save_and_load_checkpoints import Checkpoints
from quintsched.runtime.saving.saved_state import SavedState
from quintsched.runtime.saving.tensor_placement import StateLayout
from quintsched.runtime.saving.write_tensors import WrittenFile, entries_of, hash_file, require_intact

from .offline_command import main
from .split_models import State, load_state, require_same, save_state, weights_of


def tensors() -> dict[str, Tensor]:
    bits = torch.arange(24, dtype=torch.uint8)
    state = {f"x.{name}": bits.clone().view(dtype) for name, dtype in TYPES.items() if dtype is not torch.bool}
    return state | {
        "bool": torch.tensor([True, False, True]),
        "none": torch.empty(0, 5),
        "one": torch.tensor(7),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "ä/~": torch.ones(3, dtype=torch.bfloat16),
    }


def write(path: Path, state: dict[str, Tensor], metadata: dict[str, str]) -> WrittenFile:
    entries = entries_of(state)
    return write_tensors.write_tensors(path, entries, (state[entry.name] for entry in entries), metadata)


def read(path: Path) -> dict[str, Tensor]:
    saved = SavedState.of_files([path], lambda _: StateLayout())
    return {name: saved.whole(name) for name in saved.pieces}


def test_safetensors_reads_what_we_write_and_we_what_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_tensors, "MOST_MAPPED", 50)
    ours, theirs, state = tmp_path / "ours", tmp_path / "theirs", tensors()
    file = write(ours, state, {"key": "text"})
    assert file == hash_file(ours)
    require_intact(ours, file)
    require_same(load_file(ours), state)
    require_same(read(ours), state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, theirs, {"a": "b"})
    require_same(read(theirs), state)


def test_a_write_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def fails() -> Tensor:
        raise OSError(28, "No space left on device")

    state = tensors()
    with pytest.raises(OSError, match="No space"):
        write_tensors.write_tensors(tmp_path / "file", entries_of(state), (fails() for _ in state))
    assert not list(tmp_path.iterdir())


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


def save(folder: Path, size: int = 1) -> State:
    def body(transport: Transport) -> State:
        engine = engine_of(transport, size=size)
        engine.step(INPUTS, TARGETS)
        return save_state(engine, folder, 1, {"epoch": 1, "batch": 1})

    return weights_of(run_local(size, body, timeout_s=60)[0])


def resume(folder: Path, size: int = 1) -> State:
    found = run_local(size, lambda transport: load_state(engine_of(transport, size=size), folder), timeout_s=60)
    return weights_of(found[0])


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

    def through_folders(transport: Transport) -> State:
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
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_numbers_of_another_kind_are_no_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    good = save(tmp_path / "out")
    bad = {**good, "0.weight": good["0.weight"].to(dtype)}
    one = tmp_path / "one.safetensors"
    save_file(bad, one)
    assert main(["import", str(one), "--output", str(tmp_path / "begin")]) == 0
    full = {f"model.{name}": tensor for name, tensor in bad.items()}

    def with_extra(engine: Engine) -> State:
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


def torch_checkpoint(folder: Path, state: State) -> Path:
    dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    return folder
