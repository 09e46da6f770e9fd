"""Token shards: what is written is read, and what is damaged, cut short or foreign is refused in one line."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintsched.errors import InputError, UsageError
from quintsched.tokens import TokenFolder, TokenWriter, documents_of, find_tokenizer, open_tokens
from tests.helpers.refusals import require_refusals

DOCUMENTS = ([3, 1, 4], [1], [5, 9, 2, 6, 5, 3], [5, 8])


def write(folder: Path, documents: tuple[list[int], ...] = DOCUMENTS, **options: int) -> TokenFolder:
    with TokenWriter(folder, **{"vocabulary": 10, "tokenizer": "digits", **options}) as writer:
        for document in documents:
            writer.add(document)
    return open_tokens(folder)


def read(found: TokenFolder) -> list[list[int]]:
    """Return the documents of a folder."""
    parts = [np.split(shard.tokens, shard.ends[:-1].astype(np.int64)) for shard in found.shards]
    return [document.tolist() for of_shard in parts for document in of_shard]


@settings(deadline=None, max_examples=4)
@given(
    documents=st.lists(st.lists(st.integers(0, 69_999), max_size=9), min_size=6, max_size=9).filter(any),
    shard_tokens=st.integers(5, 20),
    end=st.none() | st.just(7),
)
def test_documents_are_read_as_they_were_written(tmp_path_factory, documents, shard_tokens: int, end) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    options = {"shard_tokens": shard_tokens, "vocabulary": 70_000} | ({} if end is None else {"end": end})
    found = write(folder, tuple(documents), **options)
    assert read(found) == [[*ids, *([] if end is None else [end])] for ids in documents if ids]
    assert found.index.num_tokens == sum(map(len, read(found)))
    assert all(shard.entry.tokens >= shard_tokens for shard in found.shards[:-1])
    found.verify()


def index_with(*, shard: bool = False, **changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "index.json"
        data = json.loads(path.read_text())
        (data["shards"][0] if shard else data).update(changes)
        path.write_text(json.dumps(data))

    return change


def cut(name: str, left: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, left)


def linked(folder: Path) -> None:
    (folder / "shard-00000.tokens").rename(folder.parent / f"elsewhere-{folder.name}")
    (folder / "shard-00000.tokens").symlink_to(folder.parent / f"elsewhere-{folder.name}")


BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "index.json").unlink(), r"it has no index.json: it is no folder of tokens, or its"),
    (lambda folder: (folder / "shard-00000.documents").unlink(), r"documents: cannot read .*No such file"),
    (cut("shard-00000.tokens", 22), r"tokens: it has 22 bytes, but by the index 12 numbers of 2 bytes, 24;"),
    (cut("index.json", 31), r"index.json: not JSON: .* line 1, column 32 \(the file ends too early"),
    (lambda folder: (folder / "index.json").write_bytes(b"\x80\x04K*."), r"index.json: not UTF-8 text: byte 0"),
    (index_with(format="megatron"), r"index.json: /format: Input should be 'quintsched.tokens'"),
    (index_with(version=2), r"index.json: /version: Input should be 1"),
    (index_with(vocabulary=70_000), r"index.json: /: a vocabulary of 70000 does not fit uint16"),
    (index_with(end=10), r"index.json: /: end 10 is not in the vocabulary of 10"),
    (index_with(shards=[]), r"index.json: /shards: "),
    (index_with(more=1), r"index.json: /more: unknown key"),
    (index_with(shard=True, tokens=2**62), r"tokens: it has 24 bytes, but by the index 4611686018427387904 numbers"),
    (index_with(shard=True, tokens=-1), r"index.json: /shards/0/tokens: Input should be at least 1"),
    (linked, r"shard-00000.tokens: cannot read the tokens: it is a symbolic link, not a file"),
]


def test_what_is_broken_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    for number, (damage, words) in enumerate(BROKEN):
        folder = tmp_path / f"corpus-{number}"
        write(folder)
        damage(folder)
        with pytest.raises(InputError, match=words) as found:
            open_tokens(folder)
        assert str(found.value).startswith(str(folder))
        assert "\n" not in str(found.value)


def test_what_is_damaged_within_is_found_by_verify(tmp_path: Path) -> None:
    for number, (name, place, wrong, words) in enumerate(
        (
            ("tokens", 5, 10, r"tokens: token 5 is 10, but the vocabulary has 10 ids"),
            ("tokens", 5, 8, r"tokens: its content is not that which was written: SHA-256"),
            ("documents", 1, 3, r"documents: document 1 ends at 3, not behind the one before and within 12 tokens"),
            ("documents", 1, 2**64 - 1, r"documents: document 1 ends at 18446744073709551615, not behind"),
            ("documents", 3, 11, r"documents: the last document ends at 11, but there are 12 tokens"),
            ("documents", 0, 2, r"documents: its content is not"),
        )
    ):
        path = tmp_path / f"corpus-{number}" / f"shard-00000.{name}"
        write(path.parent)
        content = np.fromfile(path, "<u2" if name == "tokens" else "<u8")
        content[place] = wrong
        content.tofile(path)
        with pytest.raises(InputError, match=f"{path.parent}/shard-00000.{words}"):
            open_tokens(path.parent).verify()


def test_what_is_not_written(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    require_refusals(
        ("document 0: id 10 at place 1 is not in", lambda: write(folder, ([3, 10],))),
        ("id -1 at", lambda: write(folder, ([-1],))),
        ("float64", lambda: write(folder, ([0.5],))),
        ("there is no token to write", lambda: write(folder, ([],))),
        ("document 2: id 10", lambda: write(folder, ([1, 2, 3], [1], [10]), shard_tokens=2)),
    )
    assert not list(folder.iterdir())
    write(folder)
    require_refusals(
        ("the folder is not empty; name a new one", lambda: write(folder)),
        ("not vocabulary=10, end=10", lambda: write(tmp_path / "b", end=10)),
        ("there is no such folder of tokens", lambda: open_tokens(tmp_path / "c")),
    )


def test_documents_of_text_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo")
    (tmp_path / "b.jsonl").write_text('{"text": "drei"}\n\n{"text": "vier é", "more": 1}\n')
    assert list(documents_of([tmp_path / "a.txt", tmp_path / "b.jsonl"])) == [b"one\ntwo", b"drei", "vier é".encode()]
    for content, words in (
        ('{"body": "x"}', r"b.jsonl, line 1: it has no text under 'text'; name another one with --field"),
        ('{"text": "x"}\n{"text"', r"b.jsonl, line 2: not JSON"),
        ('{"text": "\\ud800"}', r"line 1: .* is no text: a lone surrogate"),
    ):
        (tmp_path / "b.jsonl").write_text(content)
        with pytest.raises(InputError, match=words):
            list(documents_of([tmp_path / "b.jsonl"]))
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(InputError, match=r"a.txt: not UTF-8 text: byte 2 cannot be read"):
        list(documents_of([tmp_path / "a.txt"]))


def test_a_tokenizer_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "<end>": 1, "a": 2, "b": 3}, "<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<end>")
    fast.save_pretrained(tmp_path / "mine")
    found = find_tokenizer(str(tmp_path / "mine"))
    assert (found.name, found.vocabulary, found.end) == ("mine", 4, 1)
    assert [ids.tolist() for ids in found.encoded([b"a b", b"", b"b c"])] == [[2, 3], [], [3, 0]]
    with pytest.raises(UsageError, match="transformers finds no such tokenizer"):
        find_tokenizer(str(tmp_path))
