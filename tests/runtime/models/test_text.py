"""Text by bytes: which bytes make which sample, and what is said of a file that does not do."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quintsched.errors import InputError, UsageError
from quintsched.runtime.data import IGNORED_TARGET, PADDING, Dataset, Split, gather_batch, load_dataset
from quintsched.runtime.settings.job_file import DataConfig


def load(path: Path, **options: object) -> Dataset:
    return load_dataset(DataConfig(name="text", path=str(path), options=options))


def everything(split: Split) -> tuple[bytes, bytes]:
    """Return all inputs, and all targets, one sample after the other."""
    inputs, targets = gather_batch(split, np.arange(len(split)))
    return bytes(inputs.flatten().tolist()), bytes(targets.flatten().tolist())


@settings(deadline=None)
@given(size=st.integers(60, 300), sequence=st.integers(1, 5))
def test_each_byte_is_predicted_once_from_the_one_before(
    tmp_path_factory: pytest.TempPathFactory, size: int, sequence: int
) -> None:
    text = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8).tobytes()
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(text)
    dataset, start = load(path, sequence=sequence), size - size // 10
    for split, part in ((dataset.train, text[:start]), (dataset.validation, text[start:])):
        used = (len(part) - 1) // sequence * sequence
        assert everything(split) == (part[:used], part[1 : used + 1])
    assert dataset.spec.input_shape == (sequence,)
    assert dataset.num_classes == 256


def test_a_batch_of_bytes(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes([200, 255]) * 30)
    inputs, targets = gather_batch(load(path, sequence=3).train, np.array([1, PADDING]))
    assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)
    assert inputs.tolist() == [[255, 200, 255], [0] * 3]
    assert targets.tolist() == [[200, 255, 200], [IGNORED_TARGET] * 3]


def test_windows_are_views_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"x" * 1000)
    split = load(path, sequence=4).train
    assert (split.inputs.dtype, split.targets.dtype) == (np.uint8, np.uint8)
    assert np.shares_memory(split.inputs, split.targets)


def test_the_standard_library_is_there_and_the_same_each_time() -> None:
    first, second = (load_dataset(DataConfig(name="text")) for _ in range(2))
    assert first.spec.input_shape == (128,)
    assert (len(first.train), len(first.validation)) == (28124, 3124)
    assert everything(first.validation) == everything(second.validation)
    beginning = (Path(sysconfig.get_path("stdlib")) / "__future__.py").read_bytes()
    assert everything(first.train)[0].startswith(beginning)


def test_a_part_of_a_text(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)) + b"z" * 900)
    dataset = load(path, sequence=3, max_bytes=100)
    assert everything(dataset.train)[1][-1] < 90 <= everything(dataset.validation)[0][0]
    library = load_dataset(DataConfig(name="text", options={"max_bytes": 10_000}))
    assert (len(library.train), len(library.validation)) == (8999 // 128, 999 // 128)


def test_what_does_not_do(tmp_path: Path) -> None:
    path = tmp_path / "text"
    with pytest.raises(UsageError, match=r"data\.path: .*text: cannot be read: No such file"):
        load(path)
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        load(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="text: holds nothing"):
        load(path)
    path.write_bytes(b"x" * 1289)
    with pytest.raises(UsageError, match=r"of its 1289 bytes, the last 128 are .* too few for a window of 128 \+ 1"):
        load(path)
    path.write_bytes(b"x" * 1290)
    assert len(load(path).validation) == 1
    with pytest.raises(UsageError, match=r"data\.options\.sequnce: unknown key; did you mean 'sequence'"):
        load(path, sequnce=3)
    with pytest.raises(UsageError, match=r"data\.options\.sequence: .* not 0"):
        load(path, sequence=0)


def test_without_a_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(UsageError, match=r"data\.path: this Python has no source"):
        load_dataset(DataConfig(name="text"))
