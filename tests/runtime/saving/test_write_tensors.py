"""Files that are written tensor by tensor are those of safetensors, and damage to them is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quintsched.errors import InputError, UsageError
from quintsched.runtime.blocks.dtype_names import TYPES
from quintsched.runtime.saving import lazy_tensors, write_tensors
from quintsched.runtime.saving.checkpoints.background_saves import HostBuffer
from quintsched.runtime.saving.saved_state import SavedState
from quintsched.runtime.saving.tensor_placement import StateLayout
from quintsched.runtime.saving.write_tensors import WrittenFile, entries_of, hash_file, require_intact


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


def require_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        mine, theirs = (t.contiguous().flatten().view(torch.uint8) for t in (found[name], tensor))
        assert torch.equal(mine, theirs), name


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


def test_a_save_that_is_waited_for_writes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_tensors, "BYTES_AT_ONCE", 16)
    state = tensors() | {"long": torch.arange(50, dtype=torch.float64), "cut": torch.arange(40.0).reshape(8, 5)[:, :3]}
    copies = HostBuffer(torch.device("cpu")).copy_state(state)
    files = [write(tmp_path / str(number), given, {"key": "text"}) for number, given in enumerate((state, copies))]
    assert files[0].sha256 == files[1].sha256


def test_who_changes_what_was_read_changes_neither_the_file_nor_what_others_read(tmp_path: Path) -> None:
    path, state = tmp_path / "file", tensors()
    write(path, state, {})
    read(path)["one"].zero_()
    kept = read(path)["turned"]
    path.unlink()
    assert torch.equal(kept, state["turned"])


def test_a_type_that_safetensors_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"x is torch\.complex128, which a checkpoint cannot hold"):
        entries_of({"x": torch.zeros(1, dtype=torch.complex128)})


@pytest.mark.parametrize(("change", "words"), [("cut", "it has 3 bytes, not the"), ("flip", "its SHA-256 is not that")])
def test_a_file_that_is_not_what_its_manifest_says_is_refused(change: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = write(path, tensors(), {})
    if change == "cut":
        os.truncate(path, 3)
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with pytest.raises(InputError, match=f"{path}: the file is damaged: {words}"):
        require_intact(path, file)


def test_a_write_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def fails() -> Tensor:
        raise OSError(28, "No space left on device")

    state = tensors()
    with pytest.raises(OSError, match="No space"):
        write_tensors.write_tensors(tmp_path / "file", entries_of(state), (fails() for _ in state))
    assert not list(tmp_path.iterdir())
