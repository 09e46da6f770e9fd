"""Numbers of every type are written and read as they were, by every command, and stand for no others."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quintsched.errors import MisfitError, UsageError
from quintsched.runtime import Engine
from quintsched.runtime.blocks.block_builders import build_block
from quintsched.runtime.blocks.dtype_names import TYPES
from quintsched.runtime.saving import lazy_tensors, write_tensors
from quintsched.runtime.saving.checkpoints.save_and_load_checkpoints import Checkpoints
from quintsched.runtime.saving.index_ranges_in_full_tensors import StateLayout
from quintsched.runtime.saving.saved_state import SavedState
from quintsched.runtime.saving.write_tensors import WrittenFile, entries_of, hash_file, require_intact

from ...helpers.refusals import require_refusals
from ..trials import require_same
from .split_models import State, load_state, plan_of, run_command, run_engines, save_state, weights_of


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


def run(body: Callable[[Engine], Any], size: int = 1, middle: Callable[[], nn.Module] = Odd) -> Any:
    """Call with an engine on each rank of a pipeline; return what the first one gives."""

    def blocks() -> list[nn.Module]:
        return [build_block(block, number) for number, block in enumerate((ENDS, middle, ENDS))]

    how = {"optimizer": partial(torch.optim.AdamW, lr=0.1)}
    return run_engines(plan_of(f"pp={size}", 0), blocks, body, nn.MSELoss(), **how)[0]


ENDS = partial(nn.Linear, 6, 6)


def save(folder: Path, size: int = 1) -> State:
    def body(engine: Engine) -> State:
        engine.step(INPUTS, TARGETS)
        return save_state(engine, folder, 1, {"epoch": 1, "batch": 1})

    return weights_of(run(body, size))


def resume(folder: Path, size: int = 1) -> State:
    return weights_of(run(lambda engine: load_state(engine, folder), size))


def test_every_type_comes_back_from_every_command(tmp_path: Path) -> None:
    state = save(tmp_path / "out", 2)
    assert {tensor.dtype for tensor in state.values()} == set(TYPES.values())
    one = tmp_path / "one.safetensors"
    assert run_command("export", tmp_path / "out", output=one) == 0
    require_same(load_file(one), state)
    assert run_command("import", one, output=tmp_path / "begin") == 0
    require_same(resume(tmp_path / "begin"), state)
    assert run_command("reshard", tmp_path / "out", mesh="pp=3", output=tmp_path / "cut") == 0
    require_same(resume(tmp_path / "cut", 3), state)

    def through_folders(engine: Engine) -> None:
        engine.load_pretrained(one)
        engine.save_pretrained(tmp_path / "pretrained")
        engine.save_dcp(tmp_path / "dcp")

    def loaded(engine: Engine) -> State:
        engine.load_dcp(tmp_path / "dcp")
        return engine.full_state_dict()

    run(through_folders)
    require_same(weights_of(run(loaded)), state)
    require_same(load_file(tmp_path / "pretrained" / "model.safetensors"), state)


class Doubly(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("wide", torch.ones(2, dtype=torch.complex128))


def test_a_type_that_no_file_has_is_refused_by_name(tmp_path: Path) -> None:
    def body(engine: Engine) -> None:
        with pytest.raises(UsageError, match="format: dcp"), Checkpoints(tmp_path, keep=1).opened(engine.saves):
            pass
        engine.save_pretrained(tmp_path / "out")

    with pytest.raises(UsageError, match=r"1\.wide is torch\.complex128, which a checkpoint cannot hold"):
        run(body, middle=Doubly)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_numbers_of_another_kind_are_no_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    good = save(tmp_path / "out")
    bad = {**good, "0.weight": good["0.weight"].to(dtype)}
    one = tmp_path / "one.safetensors"
    save_file(bad, one)
    assert run_command("import", one, output=tmp_path / "begin") == 0
    full = {f"model.{name}": tensor for name, tensor in bad.items()}
    dcp.save(dict(full), checkpoint_id=tmp_path / "dcp", no_dist=True)

    def load(engine: Engine) -> None:
        calls: list[Callable[[], object]] = [
            lambda: engine.load_pretrained(one),
            lambda: engine.load_state_files([tmp_path / "begin" / "step-00000000" / "rank-00000.safetensors"]),
            lambda: engine.load_full_state_dict({**engine.full_state_dict(), **full}),
            lambda: engine.set_weights({"0.weight": bad["0.weight"]}),
            lambda: engine.load_dcp(tmp_path / "dcp"),
        ]
        said = rf"0\.weight' has numbers of {dtype}"
        require_refusals(*((said, call) for call in calls), error=MisfitError)

    run(load)
