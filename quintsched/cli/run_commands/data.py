"""`quintsched data tokenize | show`: token shards that jobs train on.

quintsched data tokenize a.txt b.jsonl -o corpus --tokenizer bytes
quintsched data show corpus --verify
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quintsched.cli.shared_options import AsJson, emit, say
from quintsched.errors import counted

if TYPE_CHECKING:
    from quintsched.tokens import TokenIndex


def tokenize(
    inputs: Annotated[list[Path], typer.Argument(metavar="INPUT...", help="Text files; a .jsonl has one per line.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="A new folder for the shards.")],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", metavar="NAME", help="bytes, or a name or a folder of transformers'.")
    ] = "bytes",
    field: Annotated[str, typer.Option("--field", metavar="KEY", help="The text in a line of a .jsonl.")] = "text",
    vocabulary: Annotated[
        int | None,
        typer.Option("--vocabulary", metavar="N", min=1, help="Ids of the model, if more than the tokenizer's."),
    ] = None,
    shard_tokens: Annotated[
        int, typer.Option("--shard-tokens", metavar="N", min=1, help="Tokens after which a new shard begins.")
    ] = 2**28,
    as_json: AsJson = False,
) -> None:
    """Write text files as token shards, which a job trains on with `data: {name: tokens, path: DIR}`.

    A file is a document; so is a line of a .jsonl file, an object with the text under "text".
    """
    from quintsched.errors import UsageError
    from quintsched.tokens import TokenWriter, documents_of, find_tokenizer, open_tokens

    for path in inputs:
        if not path.is_file():
            raise UsageError(f"{path}: there is no such text file")
    found = find_tokenizer(tokenizer)
    if vocabulary is not None and vocabulary < found.vocabulary:
        raise UsageError(f"--vocabulary {vocabulary}: the tokenizer {found.name} has {found.vocabulary} ids")
    writer = TokenWriter(
        output,
        vocabulary=vocabulary or found.vocabulary,
        tokenizer=found.name,
        end=found.end,
        shard_tokens=shard_tokens,
    )
    with writer:
        for ids in found.encoded(documents_of(inputs, field)):
            writer.add(ids)
    _report(output, open_tokens(output).index, as_json)


def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of token shards.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte, and compare it with the index.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a folder of token shards; exit code 1 where a file is not what the index says."""
    from quintsched.tokens import open_tokens

    found = open_tokens(folder)
    if verify:
        found.verify()
    _report(folder, found.index, as_json, verified=verify, shards=True)


def _report(folder: Path, index: TokenIndex, as_json: bool, *, verified: bool = False, shards: bool = False) -> None:
    totals = {"tokens": index.num_tokens, "documents": index.num_documents}
    if as_json:
        emit({"path": str(folder), **index.model_dump(mode="json"), **totals, "verified": verified})
        return
    say(
        f"{folder}: {counted(index.num_tokens, 'token')} of {counted(index.num_documents, 'document')} in "
        f"{counted(len(index.shards), 'shard')}, {index.dtype}; tokenizer {index.tokenizer}, vocabulary "
        f"{index.vocabulary}, end {'none' if index.end is None else index.end}"
    )
    if shards:
        say(
            f"shard {number}: {counted(shard.tokens, 'token')}, {counted(shard.documents, 'document')}, SHA-256 "
            f"{shard.tokens_sha256[:16]}"
            for number, shard in enumerate(index.shards)
        )
    if verified:
        say("every byte is as it was written")


DATA_COMMANDS = (tokenize, show)
