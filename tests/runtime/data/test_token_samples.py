"""Samples of token shards: windows against a plain reading of all documents, and their order as a function."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quintsched.errors import InputError, UsageError
from quintsched.runtime.data import IGNORED_TARGET, TokenDataset, TokenSamples, load_dataset
from quintsched.runtime.data import fixed_length_token_samples as windows_module
from quintsched.runtime.data.token_sample_order import MIXTURE_BLOCK, permuted, shares_of
from quintsched.runtime.settings.job_file import DataConfig
from quintsched.tokens import TokenWriter

END = 0


def write(folder: Path, lengths: list[int], shard_tokens: int = 40, vocabulary: int = 1000) -> list[list[int]]:
    """Write documents of these lengths, with ids of their own, and return them."""
    numbers = iter(range(1, vocabulary))
    documents = [[next(numbers) for _ in range(length)] for length in lengths]
    with TokenWriter(folder, vocabulary=vocabulary, tokenizer="t", end=END, shard_tokens=shard_tokens) as writer:
        for document in documents:
            writer.add(document)
    return [[*document, END] for document in documents]


def load(path: Path | None, **options: Any) -> TokenDataset:
    found = load_dataset(DataConfig(name="tokens", path=None if path is None else str(path), options=options))
    assert isinstance(found, TokenDataset)
    return found


def everything(samples: TokenSamples, **options: Any) -> Any:
    return samples.batch(np.arange(len(samples)), **options)


@settings(deadline=None, max_examples=60)
@given(size=st.integers(1, 600), key=st.lists(st.integers(0, 2**64 - 1), max_size=4))
def test_a_keyed_order_is_a_permutation(size: int, key: list[int]) -> None:
    found = permuted(np.arange(size), size, *key)
    assert sorted(found.tolist()) == list(range(size))
    assert permuted(np.arange(size)[::3], size, *key).tolist() == found[::3].tolist()


def test_keyed_orders_differ_and_never_change_between_releases() -> None:
    """The numbers were computed by Python's whole numbers, from the description of the module."""
    assert permuted(np.arange(8), 200, 5, 2**64 - 1).tolist() == [46, 66, 32, 92, 51, 192, 12, 132]
    large = permuted(np.arange(1000), 2**40, 1)
    assert len(set(large.tolist())) == 1000
    assert 0.45 < large.mean() / 2**40 < 0.55
    assert abs(np.corrcoef(large[:-1], large[1:])[0, 1]) < 0.15
    assert (large != permuted(np.arange(1000), 2**40, 2)).all()


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=4, max_size=20).filter(lambda found: sum(found) > 60),
    sequence=st.integers(1, 8),
    shard_tokens=st.integers(20, 90),
)
def test_each_token_of_a_document_is_predicted_once(tmp_path_factory, lengths, sequence, shard_tokens):
    folder = tmp_path_factory.mktemp("tokens")
    documents = write(folder, lengths, shard_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows_module, "INDEXED", 3)  # several blocks of documents
        found = load(folder, sequence=sequence, pack=False, validation=0.2)
        seen = []
        for split in (found.train, found.validation):
            inputs, targets, extras = everything(split)
            assert not extras
            assert inputs.shape == targets.shape == (len(split), sequence)
            for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
                real = sum(target != IGNORED_TARGET for target in wanted)
                assert row[1:real] == wanted[: real - 1]
                assert row[real:] == [0] * (sequence - real)
                assert wanted[real:] == [IGNORED_TARGET] * (sequence - real)
                seen += list(zip(row[:real], wanted[:real], strict=True))
    assert Counter(seen) == Counter(pair for ids in documents for pair in pairwise(ids))


def test_documents_of_packed_windows(tmp_path: Path) -> None:
    documents = write(tmp_path, [3, 1, 1, 9, 20], shard_tokens=1000)
    found = load(tmp_path, sequence=6, mask_documents=True, validation=0.01).train
    plain = load(tmp_path, sequence=6, validation=0.01).train
    inputs, targets, extras = everything(found)
    owner = {token: number for number, ids in enumerate(documents) for token in ids[:-1]}
    for row, wanted, bare, ids in zip(
        inputs.tolist(), targets.tolist(), everything(plain)[1].tolist(), extras["document_ids"].tolist(), strict=True
    ):
        assert ids == sorted(ids)
        assert ids[0] == 0
        known = [(owner[token], number) for token, number in zip(row, ids, strict=True) if token != END]
        assert len({mine - number for mine, number in known}) <= 1
        assert wanted == [IGNORED_TARGET if token == END else one for token, one in zip(row, bare, strict=True)]
    alone = found.batch(np.arange(len(found)), ids=False)
    assert alone[:2] == (None, None)
    assert torch.equal(alone[2]["document_ids"], extras["document_ids"])


def test_a_mixture_has_its_weights_in_every_block(tmp_path: Path) -> None:
    for name, lengths in (("few", [6, 9]), ("many", [40] * 12), ("some", [20] * 5)):
        write(tmp_path / name, lengths)
    mixture = [{"path": "few", "weight": 1}, {"path": "many", "weight": 6.5}, {"path": "some", "weight": 2.5}]
    samples = load(tmp_path, sequence=4, mixture=mixture, samples=2 * MIXTURE_BLOCK).train
    owners, windows = samples.windows(np.arange(2 * MIXTURE_BLOCK), seed=9)
    for block in owners.reshape(2, MIXTURE_BLOCK):
        assert np.bincount(block).tolist() == [1000, 6500, 2500]
    early = np.bincount(owners[:500], minlength=3) / 500
    assert abs(early - [0.1, 0.65, 0.25]).max() < 0.06
    for number, source in enumerate(
        samples.sources
    ):  # each is passed over evenly, to within the pass that is under way
        counts = np.bincount(windows[owners == number], minlength=source.count)
        assert len(counts) == source.count
        assert counts.max() - counts.min() <= 2
    again = samples.windows(np.array([19_999, 12_345, 7]), seed=9)
    assert again[0].tolist() == owners[[19_999, 12_345, 7]].tolist()
    assert again[1].tolist() == windows[[19_999, 12_345, 7]].tolist()
    assert (samples.windows(np.arange(MIXTURE_BLOCK), seed=8)[0] != owners[:MIXTURE_BLOCK]).any()
    assert shares_of([1, 1, 1]) == [3334, 3333, 3333]


def test_what_does_not_do(tmp_path: Path) -> None:
    write(tmp_path / "a", [30, 30])
    write(tmp_path / "b", [30, 30], vocabulary=2000)
    for options, words in (
        ({}, r"data.path: 'tokens' needs a folder of token shards"),
        ({"pack": False, "mask_documents": True}, "mask_documents is for packed samples"),
        ({"mixture": [{"path": "a", "weight": 0}]}, r"data.options.mixture.0.weight: .*greater than 0"),
        ({"validation": 1.5}, "validation is a fraction between 0 and 1, or another folder, not 1.5"),
        ({"mixture": [{"path": "a", "wieght": 1}]}, r"mixture.0.wieght: unknown key; did you mean 'weight'"),
        ({"mixture": {"a": 0.7}}, r"mixture: is a list: \[{path: …, weight: …}, …\], not {'a': 0.7}"),
    ):
        with pytest.raises(UsageError, match=words):
            load(None, **options)
    sources = [{"path": name, "weight": 1} for name in "ab"]
    unlike = [{"path": "a", "weight": 1}, {"path": "a", "weight": 1e6}]
    for path, options, words in (
        (".", {"mixture": sources}, "b: its ids are of the tokenizer t with a vocabulary of 2000, but those of"),
        (".", {"mixture": sources[:1], "validation": "b"}, "its ids are of the tokenizer"),
        (".", {"mixture": unlike}, "the weight of a is less than half of 1 / 10000 of all"),
        ("a", {"sequence": 62}, r"its 62 tokens are too few for a sample of 62 \+ 1"),
        ("a", {"sequence": 40}, "there is one sample, and none is left for training"),
    ):
        with pytest.raises((InputError, UsageError), match=words):
            load(tmp_path / path, **{"sequence": 4, **options})
    assert len(load(tmp_path, sequence=40, mixture=sources[:1], validation="a").validation) == 1


@pytest.mark.parametrize("pack", [True, False])
def test_an_id_that_is_none_is_refused_as_it_is_read(tmp_path: Path, pack: bool) -> None:
    write(tmp_path, [30, 30, 30], shard_tokens=200)
    ids = np.fromfile(tmp_path / "shard-00000.tokens", "<u2")
    ids[37] = 1000
    ids.tofile(tmp_path / "shard-00000.tokens")
    samples = load(tmp_path, sequence=4, pack=pack).train
    with pytest.raises(InputError, match=r"shard-00000.tokens: token 37 is 1000, but the vocabulary has 1000 ids"):
        everything(samples)
    ends = np.fromfile(tmp_path / "shard-00000.documents", "<u8")
    ends[[0, 1]] = ends[[1, 0]]
    ends.tofile(tmp_path / "shard-00000.documents")
    with pytest.raises(InputError, match=r"shard-00000.documents: document 1 ends at 31, not behind the one before"):
        load(tmp_path, sequence=4, pack=pack, mask_documents=pack)
