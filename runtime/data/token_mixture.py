"""The data source "tokens" of a job: one folder of token shards, or a mixture of several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from quintsched.errors import InputError, UsageError, counted
from quintsched.tokens import TokenFolder, open_tokens

from ..settings.engine_settings import Settings
from .fixed_length_token_samples import DocumentWindows, PackedWindows, Windows
from .memory_dataset import DataSpec
from .token_sample_order import MIXTURE_BLOCK, TokenDataset, TokenSamples, WindowSource, shares_of


class MixturePart(Settings):
    """One source of a mixture."""

    path: str
    """A folder of token shards; a relative one is in `data.path`, if that is set."""
    weight: float = Field(gt=0)
    """Its share of the samples, relative to the other weights."""


class TokenOptions(Settings):
    """Options of token shards."""

    sequence: int = Field(default=1024, ge=1)
    """Tokens of a sample."""
    pack: bool = True
    """Whether samples go across documents; else each begins within one, and is padded where that ends."""
    mask_documents: bool = False
    """Whether attention is kept within documents, and no token predicted from the document before; needs `pack`."""
    mixture: Annotated[tuple[MixturePart, ...], Field(strict=False)] = ()
    """Sources and their weights, in place of the one in `data.path`."""
    samples: int | None = Field(default=None, ge=1)
    """Samples of an epoch; none: as many as there are in all sources."""
    validation: float | str = 0.01
    """Fraction of each source's samples, at its end, that is for validation, at least one; or another folder."""
    prefetch: int = Field(default=4, ge=0, le=100)
    """Batches that a thread reads ahead; 0: each is read when it is due."""

    @model_validator(mode="after")
    def _options_fit(self) -> TokenOptions:
        if not isinstance(self.validation, str) and not 0 < self.validation < 1:
            raise ValueError(f"validation is a fraction between 0 and 1, or another folder, not {self.validation:g}")
        if self.mask_documents and not self.pack:
            raise ValueError("mask_documents is for packed samples; without pack a sample holds one document anyway")
        return self


def load_tokens(path: str | None, options: TokenOptions) -> TokenDataset:
    """Return the samples of a folder of token shards, or of a mixture of them.

    Raises `UsageError` for folders that are missing and options that do not fit, or that leave no sample; `InputError`
    for broken files and sources of different tokenizers.
    """
    if path is None and not options.mixture:
        raise UsageError(
            "data.path: 'tokens' needs a folder of token shards, which `quintsched data tokenize` writes; or sources "
            "in data.options.mixture"
        )
    root = Path(path or "")
    parts = options.mixture or (MixturePart(path="", weight=1.0),)
    folders = [open_tokens(root / part.path) for part in parts]
    held_out = options.validation
    other = open_tokens(root / held_out) if isinstance(held_out, str) else None
    _require_one_vocabulary([*folders, *([] if other is None else [other])])
    made = [_windows(folder, options) for folder in folders]
    kept = [_kept(windows, None if isinstance(held_out, str) else held_out) for windows in made]
    shares = shares_of([part.weight for part in parts])
    if 0 in shares:
        raise UsageError(
            f"data.options.mixture: the weight of {parts[shares.index(0)].path} is less than half of 1 / "
            f"{MIXTURE_BLOCK} of all; leave it out, or raise it"
        )
    train = tuple(
        WindowSource(windows, 0, count, share) for windows, count, share in zip(made, kept, shares, strict=True)
    )
    rest = [WindowSource(windows, count, len(windows) - count) for windows, count in zip(made, kept, strict=True)]
    if other is not None:
        windows = _windows(other, options)
        rest = [WindowSource(windows, 0, len(windows))]
    apart = options.mask_documents
    return TokenDataset(
        train=TokenSamples(train, options.samples or sum(kept), True, apart),
        validation=TokenSamples(tuple(rest), sum(source.count for source in rest), False, apart),
        spec=DataSpec(input_shape=(options.sequence,), num_classes=folders[0].index.vocabulary),
        prefetch=options.prefetch,
    )


def _windows(folder: TokenFolder, options: TokenOptions) -> Windows:
    if options.pack:
        found: Windows = PackedWindows(folder, options.sequence, apart=options.mask_documents)
    else:
        found = DocumentWindows(folder, options.sequence)
    if not len(found):
        raise UsageError(
            f"{folder.path}: its {counted(folder.index.num_tokens, 'token')} are too few for a sample of "
            f"{options.sequence} + 1 in a shard; set data.options.sequence to a smaller size"
        )
    return found


def _kept(windows: Windows, held_out: float | None) -> int:
    """Return how many windows are for training."""
    if held_out is None:
        return len(windows)
    kept = len(windows) - max(1, int(len(windows) * held_out))
    if not kept:
        raise UsageError(
            f"{windows.folder.path}: there is one sample, and none is left for training; set data.options.sequence to "
            "a smaller size, or data.options.validation to another folder"
        )
    return kept


def _require_one_vocabulary(folders: Sequence[TokenFolder]) -> None:
    """Raise `InputError` where folders have ids of different tokenizers."""
    first = folders[0]
    for other in folders[1:]:
        names = [(folder.index.tokenizer, folder.index.vocabulary) for folder in (first, other)]
        if names[0] != names[1]:
            raise InputError(
                f"{other.path}: its ids are of the tokenizer {names[1][0]} with a vocabulary of {names[1][1]}, but "
                f"those of {first.path} of {names[0][0]} with {names[0][1]}; tokenize them alike"
            )
