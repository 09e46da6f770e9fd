"""Text by bytes: which bytes make which sample, and refused files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintsched.errors import InputError, UsageError
from quintsched.runtime.data import Dataset, Split, gather_batch, load_dataset
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


def test_what_does_not_do(tmp_path: Path) -> None:
    path = tmp_path / "text"
    with pytest.raises(UsageError, match=r"data\.path: .*text: cannot be read: No such file"):
        load(path)
    with pytest.raises(UsageError, match=r"Is a directory; data\.name: tokens reads a folder of token shards"):
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
