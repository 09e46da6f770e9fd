"""`quintsched data`: text files become token shards, which are shown and verified."""

from pathlib import Path

import pytest


def test_tokenize_and_show(cli, tmp_path):
    Path("a.txt").write_text("hello world")
    Path("b.jsonl").write_text('{"body": "one"}\n{"body": "two more"}\n')
    options = ("-o", "corpus", "--tokenizer", "bytes", "--field", "body", "--shard-tokens", 12)
    done = cli("data", "tokenize", "a.txt", "b.jsonl", *options)
    assert done.code == 0
    said = "corpus: 25 tokens of 3 documents in 2 shards, uint16; tokenizer bytes, vocabulary 256, end 0\n"
    assert done.out == said
    assert Path("corpus/shard-00000.tokens").read_bytes() == "hello world\0".encode("utf-16-le")
    shown = cli("data", "show", "corpus", "--verify")
    assert shown.out.startswith(said + "shard 0: 12 tokens, 1 document, SHA-256 ")
    assert shown.out.endswith("every byte is as it was written\n")
    data = cli("data", "show", "corpus", "--json").data
    assert (data["tokens"], data["documents"], data["vocabulary"], data["verified"]) == (25, 3, 256, False)
    with Path("corpus/shard-00001.tokens").open("r+b") as file:
        file.write(b"x")
    assert cli("data", "show", "corpus").code == 0
    broken = cli("data", "show", "corpus", "--verify")
    assert broken.code == 1
    assert broken.err.startswith("error: corpus/shard-00001.tokens: its content is not that which was written")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("show", "nothing"), "nothing: there is no such folder of tokens"),
        (("tokenize", "nothing", "-o", "c"), "nothing: there is no such text file"),
        (("tokenize", "a.txt", "-o", "."), ".: the folder is not empty"),
        (("tokenize", "a.txt", "-o", "c", "--vocabulary", 200), "--vocabulary 200: the tokenizer bytes has 256 ids"),
    ],
)
def test_what_is_refused(refused, command, words):
    Path("b.jsonl").write_text('{"text": "a"}\n{"text": \n')
    said = refused(1, "data", "tokenize", "b.jsonl", "-o", "other")
    assert "b.jsonl, line 2: not JSON: Expecting value at column 9" in said
    Path("a.txt").write_text("text")
    assert words in refused(2, "data", *command)
    assert not Path("c").exists()
