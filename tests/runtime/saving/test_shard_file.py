"""The file of a rank is one of safetensors, both ways, and whatever else a header says is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from quintsched.errors import InputError, UsageError
from quintsched.runtime.blocks.number_types import TYPES
from quintsched.runtime.checkpoint import shard_file
from quintsched.runtime.checkpoint.host_buffer import HostBuffer
from quintsched.runtime.checkpoint.shard_file import (
    Layout,
    blocks_of,
    blocks_of_state,
    hash_file,
    read_shard,
    write_shard,
)


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


def same(found: Mapping[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        mine, theirs = (t.contiguous().flatten().view(torch.uint8) for t in (found[name], tensor))
        assert torch.equal(mine, theirs), name


def test_safetensors_reads_what_we_write_and_we_what_it_writes(tmp_path: Path) -> None:
    ours, theirs, state = tmp_path / "ours", tmp_path / "theirs", tensors()
    layout, memory = HostBuffer(torch.device("cpu")).take(state, {"key": "text"})
    file = write_shard(ours, layout, blocks_of(memory))
    assert file == hash_file(ours)
    same(load_file(ours), state)
    found, metadata = read_shard(ours, file)
    same(found, state)
    assert metadata == {"key": "text"}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, theirs, {"a": "b"})
    found, metadata = read_shard(theirs, hash_file(theirs))
    same(found, state)
    assert metadata == {"a": "b"}


def test_a_save_that_is_waited_for_writes_the_same_bytes_without_a_copy_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_file, "BLOCK", 16)
    state = tensors() | {"long": torch.arange(50, dtype=torch.float64), "cut": torch.arange(40.0).reshape(8, 5)[:, :3]}
    layout, memory = HostBuffer(torch.device("cpu")).take(state, {"key": "text"})
    files = [
        write_shard(tmp_path / str(number), layout, blocks)
        for number, blocks in enumerate((blocks_of(memory), blocks_of_state(layout, state)))
    ]
    assert files[0].sha256 == files[1].sha256


def test_who_changes_what_was_read_changes_neither_the_file_nor_what_others_read(tmp_path: Path) -> None:
    path, state = tmp_path / "file", tensors()
    layout, memory = HostBuffer(torch.device("cpu")).take(state, {})
    file = write_shard(path, layout, blocks_of(memory))
    found, _ = read_shard(path, file)
    found["one"].zero_()
    kept = found["turned"]
    path.unlink()
    assert torch.equal(kept, state["turned"])
    write_shard(path, layout, blocks_of(memory))
    same(read_shard(path, file)[0], state)


def test_tensors_that_do_not_lie_as_their_type_has_to_are_read() -> None:
    header = (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}}'
    )
    memory = torch.cat([torch.tensor([9], dtype=torch.uint8), torch.tensor([1.5]).view(torch.uint8)])
    views = Layout.parse(header, 5).views(memory)
    assert views["a"].tolist() == [9]
    assert views["b"].tolist() == [1.5]


def test_a_type_that_safetensors_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"x is torch\.complex128, which a checkpoint cannot hold"):
        Layout.of({"x": torch.zeros(1, dtype=torch.complex128)}, {})


GOOD: dict[str, Any] = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "U8", "shape": [], "data_offsets": [24, 25]},
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": None}, "/a: has to have"),
        ({"a": GOOD["a"] | {"more": 1}}, "/a: has to have data_offsets, dtype, shape"),
        ({"a": GOOD["a"] | {"dtype": "F33"}}, "/a/dtype: there is no 'F33'"),
        ({"a": GOOD["a"] | {"dtype": ["F32"]}}, "/a/dtype: there is no"),
        ({"a": GOOD["a"] | {"shape": [2, -3]}}, "/a/shape: is not a list of sizes"),
        ({"a": GOOD["a"] | {"shape": [True, 6]}}, "/a/shape: is not a list of sizes"),
        ({"a": GOOD["a"] | {"shape": [1] * 99}}, "/a/shape: is not a list of sizes"),
        ({"a": GOOD["a"] | {"shape": [2, 4]}}, "/a: has 24 bytes, which are not those of its shape"),
        ({"a": GOOD["a"] | {"data_offsets": [0]}}, "/a/data_offsets: are not two"),
        ({"a": GOOD["a"] | {"data_offsets": [24, 0]}}, "/a: has -24 bytes"),
        ({"a": GOOD["a"] | {"data_offsets": [1, 25]}}, "/a: begins at byte 1, not at 0"),
        ({"b": GOOD["b"] | {"data_offsets": [23, 24]}}, "/b: begins at byte 23, not at 24"),
        ({"b": GOOD["b"] | {"data_offsets": [25, 26]}}, "/b: begins at byte 25, not at 24"),
        ({"c": {"dtype": "U8", "shape": [1], "data_offsets": [25, 26]}}, "describes 26 bytes, but 25 follow"),
        ({"x" * 9999: GOOD["b"]}, "longer than the 4096 characters"),
        ({"__metadata__": {"a": 1}}, "/__metadata__: has to have texts"),
        ({"__metadata__": []}, "/__metadata__: has to have texts"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(change: dict[str, Any], words: str) -> None:
    assert len(Layout.parse(json.dumps(GOOD).encode(), 25).slots) == 2
    with pytest.raises(InputError) as refused:
        Layout.parse(json.dumps(GOOD | change).encode(), 25)
    assert words in str(refused.value)


@given(st.data())
def test_what_we_take_safetensors_takes(data: st.DataObject) -> None:
    text = bytearray(json.dumps(GOOD).encode())
    for _ in range(data.draw(st.integers(0, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        layout = Layout.parse(bytes(text), 25)
    except InputError:
        return
    found = load(len(text).to_bytes(8, "little") + bytes(text) + bytes(25))
    assert {name: (t.dtype, tuple(t.shape)) for name, t in found.items()} == {
        slot.name: (slot.dtype, slot.shape) for slot in layout.slots
    }
