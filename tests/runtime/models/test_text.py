"""Text by bytes: which bytes make which sample, and refused files."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintsched.errors import InputError, UsageError
from quintsched.runtime.data import Dataset, gather_batch, load_dataset
from quintsched.runtime.settings.job_file import DataConfig


def load(path: Path, **options: object) -> Dataset:
    return load_dataset(DataConfig(name="text", path=str(path), options=options))


@settings(deadline=None)
@given(size=st.integers(60, 300), sequence=st.integers(1, 5))
def test_each_byte_is_predicted_once_from_the_one_before(tmp_path_factory, size, sequence):
    text = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8).tobytes()
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(text)
    dataset, start = load(path, sequence=sequence), size - size // 10
    for split, part in ((dataset.train, text[:start]), (dataset.validation, text[start:])):
        used = (len(part) - 1) // sequence * sequence
        inputs, targets = (bytes(t.flatten().tolist()) for t in gather_batch(split, np.arange(len(split))))
        assert (inputs, targets) == (part[:used], part[1 : used + 1])
    assert dataset.spec.input_shape == (sequence,)
    assert dataset.num_classes == 256


def test_what_does_not_do(tmp_path: Path) -> None:
    path = tmp_path / "text"
    with pytest.raises(UsageError, match=r"data\.path: .*text: cannot be read: No such file"):
        load(path)
    with pytest.raises(UsageError, match=r"Is a directory; data\.name: tokens reads a folder of token shards"):
        load(tmp_path)
    for size, options, kind, words in (
        (0, {}, InputError, "text: holds nothing"),
        (1289, {}, UsageError, r"of its 1289 bytes, the last 128 are .* too few for a window of 128 \+ 1"),
        (1290, {"sequnce": 3}, UsageError, r"data\.options\.sequnce: unknown key; did you mean 'sequence'"),
        (1290, {"sequence": 0}, UsageError, r"data\.options\.sequence: .* not 0"),
    ):
        path.write_bytes(b"x" * size)
        with pytest.raises(kind, match=words):
            load(path, **options)
    assert len(load(path).validation) == 1
