"""Places where a run writes: paths, and URLs of buckets. Text that only looks like one of them is refused.

out/checkpoints                         a folder
s3://bucket/run-7                       a place in a bucket
file:///out, S3://b/run, s3:/b/run      neither: a folder of that name would be made in the current one
s3:///                                  the same: without the name of a bucket
s3://bucket/lr*                         a pattern to clients of buckets, which remove whatever fits it
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from quintsched.errors import UsageError, printable

URL = re.compile(r"(?!file:)[a-z][a-z0-9+.-]+://[^/].*", re.DOTALL)
"""A place that is a bucket, not a folder."""
_LIKE_A_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/|.*://", re.DOTALL)
_NO_PLAIN_NAME = re.compile(r"[*?\[\]#\x00-\x1f\x7f]|::|(?<!:)//(?!$)|/\.\.?(?=/|$)")


class PlaceError(UsageError, ValueError):
    """A text that only looks like a path or a URL; a `ValueError` too, to which pydantic adds the key."""


def checked_place(text: str) -> str:
    """Return the path of a folder or the URL of a place in a bucket; raises `PlaceError` for other text."""
    if not URL.fullmatch(text):
        return checked_path(text)
    if odd := _NO_PLAIN_NAME.search(text):
        raise PlaceError(
            f"{printable(text)}: a URL of checkpoints has no {odd[0]!r}: to clients of buckets it is no plain name"
        )
    return text


def checked_path(text: str) -> str:
    """Return a path on a disk; raises `PlaceError` for a URL."""
    if _LIKE_A_URL.match(text):
        raise PlaceError(
            f"{printable(text)}: it is no path on a disk, nor a URL such as s3://bucket/run where one can be given"
        )
    return text


PlaceText = Annotated[str, AfterValidator(checked_place)]
PathText = Annotated[str, AfterValidator(checked_path)]
