import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quintsched.errors import InputError, MisfitError, UsageError
from quintsched.runtime.data import (
    IGNORED_TARGET,
    PADDING,
    BatchSampler,
    Dataset,
    Normalization,
    Split,
    gather_batch,
    load_dataset,
)
from quintsched.runtime.data.data_sources import read_idx
from quintsched.runtime.settings.job_file import DataConfig

sizes = st.integers(1, 50)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder: Path, *, zipped: bool = False, dotted: bool = False) -> None:
    """Six training and four validation images of 3 x 2 pixels, the k-th full of k, its label k % 3."""
    for part, count in (("train", 6), ("t10k", 4)):
        labels = np.arange(count, dtype=np.uint8)
        images = np.repeat(labels, 6).reshape(count, 3, 2)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels % 3)):
            name = f"{part}-{kind}-ubyte".replace("-idx", ".idx" if dotted else "-idx")
            content = gzip.compress(idx(array)) if zipped else idx(array)
            (folder / (name + ".gz" * zipped)).write_bytes(content)


WHOLE = gzip.compress(idx(np.arange(200, dtype=np.uint8)), compresslevel=0)
FLIPPED = WHOLE[:-20] + bytes([WHOLE[-20] ^ 1]) + WHOLE[-19:]
"""A bit is flipped, which fails the checksum."""


@settings(deadline=None)
@given(num_samples=sizes, batch_size=sizes, seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 9))
def test_every_sample_once_then_padding(num_samples: int, batch_size: int, seed: int, epoch: int) -> None:
    sampler = BatchSampler(num_samples=num_samples, batch_size=batch_size, seed=seed)
    batches = list(sampler.batches(epoch))
    assert len(batches) == sampler.num_batches
    assert {batch.shape for batch in batches} == {(batch_size,)}
    everything = np.concatenate(batches)
    assert sorted(everything[:num_samples]) == list(range(num_samples))
    assert (everything[num_samples:] == PADDING).all()


@settings(deadline=None)
@given(num_samples=sizes, batch_size=sizes, start=sizes)
def test_a_sampler_continues_at_any_batch(num_samples: int, batch_size: int, start: int) -> None:
    sampler = BatchSampler(num_samples=num_samples, batch_size=batch_size, seed=3)
    whole, rest = list(sampler.batches(2)), list(sampler.batches(2, start=start))
    np.testing.assert_equal(rest, whole[start:])


def test_order_depends_on_seed_and_epoch_and_never_changes_between_releases() -> None:
    samplers = [BatchSampler(num_samples=8, batch_size=8, seed=seed) for seed in range(3)]
    orders = {tuple(next(sampler.batches(epoch)).tolist()) for sampler in samplers for epoch in range(3)}
    assert len(orders) == 9
    assert next(samplers[1].batches(0)).tolist() == [3, 5, 2, 7, 0, 6, 1, 4]


def test_gather_pads_after_normalizing() -> None:
    pixels = np.array([[0], [10], [20]], dtype=np.uint8)
    split = Split(inputs=pixels, targets=np.array([4, 5, 6]), normalization=Normalization(mean=10, std=5))
    inputs, targets = gather_batch(split, np.array([2, PADDING, 0]))
    torch.testing.assert_close(inputs, torch.tensor([[2.0], [0.0], [-2.0]]))
    assert targets.tolist() == [6, IGNORED_TARGET, 4]
    assert pixels.tolist() == [[0], [10], [20]]


def test_splits_are_checked() -> None:
    with pytest.raises(MisfitError, match="3 inputs and 2 targets"):
        Split(inputs=np.zeros((3, 1)), targets=np.zeros(2, dtype=np.int64))
    one, two = (Split(inputs=np.zeros((1, size)), targets=np.zeros(1, dtype=np.int64)) for size in (1, 2))
    with pytest.raises(MisfitError, match="shape"):
        Dataset(name="x", train=one, validation=two, num_classes=1)


def test_digits_are_split_the_same_and_normalized() -> None:
    first, second = load_dataset(DataConfig()), load_dataset(DataConfig())
    assert (len(first.train), len(first.validation)) == (1437, 360)
    assert first.spec.input_shape == (1, 8, 8)
    assert first.spec.num_classes == 10
    np.testing.assert_equal(first.train.targets, second.train.targets)
    inputs, _ = gather_batch(first.train, np.arange(1437))
    assert inputs.dtype == torch.float32
    assert abs(inputs.mean()) < 0.02
    assert abs(inputs.std() - 1) < 0.02


@pytest.mark.parametrize("spelling", [{}, {"zipped": True, "dotted": True}])
def test_idx_files_of_every_spelling(tmp_path: Path, spelling: dict[str, bool]) -> None:
    write_mnist(tmp_path, **spelling)
    dataset = load_dataset(DataConfig(path=str(tmp_path)))
    assert (len(dataset.train), len(dataset.validation)) == (6, 4)
    assert dataset.spec.input_shape == (1, 3, 2)
    assert dataset.num_classes == 3
    inputs, targets = gather_batch(dataset.train, np.array([5]))
    torch.testing.assert_close(inputs, torch.full((1, 1, 3, 2), (5 / 255 - 0.1307) / 0.3081))
    assert targets.tolist() == [2]


def test_what_is_no_idx_file(tmp_path: Path) -> None:
    file, plain = tmp_path / "images", idx(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))
    for whole in (plain, gzip.compress(plain)):  # cut short or grown anywhere
        for content in [*(whole[:size] for size in range(len(whole))), whole + b"x"]:
            file.write_bytes(content)
            with pytest.raises(InputError, match=str(file)):
                read_idx(file, dims=3)
    for content, dims, fault in (
        (FLIPPED, 1, "gzip"),
        (bytes([0, 0, 8, 3]) + b"\xff" * 12, 3, "only 0 bytes"),  # absurd sizes, which take no memory
        (idx(np.zeros(3, dtype=np.uint8)), 3, "starts with 00 00 08 01, not with IDX's 00 00 08 03"),
    ):
        file.write_bytes(content)
        with pytest.raises(InputError, match=fault):
            read_idx(file, dims=dims)


def test_a_users_loader(tmp_path: Path) -> None:
    file = tmp_path / "my_data.py"
    file.write_text(
        "import numpy as np\n"
        "from quintsched.runtime.data import Dataset, Split\n"
        "def load(path, size):\n"
        "    split = Split(inputs=np.zeros((size, 2)), targets=np.zeros(size, dtype=np.int64))\n"
        "    return Dataset(name=path, train=split, validation=split, num_classes=1)\n"
        "def wrong():\n"
        "    return 3\n"
    )
    dataset = load_dataset(DataConfig(name=f"{file}:load", path="here", options={"size": 3}))
    assert (dataset.name, len(dataset.train)) == ("here", 3)
    with pytest.raises(UsageError, match="wrong returned 3; return a data set"):
        load_dataset(DataConfig(name=f"{file}:wrong"))


def load_text(path: Path, **options: object) -> Dataset:
    return load_dataset(DataConfig(name="text", path=str(path), options=options))


@settings(deadline=None)
@given(size=st.integers(60, 300), sequence=st.integers(1, 5))
def test_each_byte_is_predicted_once_from_the_one_before(tmp_path_factory, size, sequence):
    text = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8).tobytes()
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(text)
    dataset, start = load_text(path, sequence=sequence), size - size // 10
    for split, part in ((dataset.train, text[:start]), (dataset.validation, text[start:])):
        used = (len(part) - 1) // sequence * sequence
        inputs, targets = (bytes(t.flatten().tolist()) for t in gather_batch(split, np.arange(len(split))))
        assert (inputs, targets) == (part[:used], part[1 : used + 1])
    assert dataset.spec.input_shape == (sequence,)
    assert dataset.num_classes == 256


def test_texts_that_do_not_do(tmp_path: Path) -> None:
    path = tmp_path / "text"
    with pytest.raises(UsageError, match=r"data\.path: .*text: cannot be read: No such file"):
        load_text(path)
    with pytest.raises(UsageError, match=r"Is a directory; data\.name: tokens reads a folder of token shards"):
        load_text(tmp_path)
    for size, options, kind, words in (
        (0, {}, InputError, "text: holds nothing"),
        (1289, {}, UsageError, r"of its 1289 bytes, the last 128 are .* too few for a window of 128 \+ 1"),
        (1290, {"sequnce": 3}, UsageError, r"data\.options\.sequnce: unknown key; did you mean 'sequence'"),
        (1290, {"sequence": 0}, UsageError, r"data\.options\.sequence: .* not 0"),
    ):
        path.write_bytes(b"x" * size)
        with pytest.raises(kind, match=words):
            load_text(path, **options)
    assert len(load_text(path).validation) == 1
