"""Traces of torch.profiler, as `export_chrome_trace` writes them, compressed or not.

{"baseTimeNanoseconds": …, "traceEvents": [{"ph": "X", "name": "aten::mm", "ts": µs after the base, "dur": µs, …}, …]}
"""

from __future__ import annotations

import gzip
import re
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

from quintsched.errors import InputError
from quintsched.files.atomic import read_whole
from quintsched.files.strictjson import parse_strict

MOST_PROFILE_BYTES = 2**31
GZIP_MAGIC = b"\x1f\x8b"

Profile: TypeAlias = dict[str, Any]


def read_profile(path: Path) -> Profile | None:
    """Return the content of a trace; None for JSON that is none.

    Raises `UsageError` if the file cannot be read, `InputError` if it is too large or damaged.
    """
    data = read_whole(path, MOST_PROFILE_BYTES, "the trace")
    try:
        trace = parse_strict(_decompressed(data) if data.startswith(GZIP_MAGIC) else data)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return trace if isinstance(trace, dict) and isinstance(trace.get("traceEvents"), list) else None


def _decompressed(data: bytes) -> bytes:
    try:
        with gzip.open(BytesIO(data)) as stream:
            text = stream.read(MOST_PROFILE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"a damaged gzip stream: {error}") from None
    if len(text) > MOST_PROFILE_BYTES:
        raise InputError(f"it has more than the {MOST_PROFILE_BYTES} bytes that are read")
    return text


def profiled_rank(trace: Profile, path: Path) -> int:
    """Return the global rank that a trace states, or else the first number in its file's name."""
    stated = trace.get("distributedInfo", {}).get("rank")
    numbers = re.findall(r"\d+", path.name)
    return int(stated if stated is not None else numbers[0])


def base_us(trace: Profile) -> float:
    """Return the time of day from which a trace counts, in microseconds."""
    return float(trace.get("baseTimeNanoseconds", 0)) / 1e3
