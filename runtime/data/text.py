"""Text, byte by byte: a file, or the source of Python's standard library, which is always there.

    bytes      │ d e f · f ( x ) : │ …            windows of `sequence` = 4, one next to the other:
    inputs     │ d e f · │ f ( x ) │              every byte of a split but its first is predicted once
    targets    │ e f · f │ ( x ) : │

The last tenth of the bytes is for validation. Windows are views of the bytes; a batch alone is copied.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import Field

from quintsched.errors import InputError, UsageError

from ..settings.strict_settings import Settings
from .dataset import Dataset, Split

BYTE_VALUES = 256
STANDARD_LIBRARY_BYTES = 4_000_000
"""How much of the standard library is read at most."""

Bytes = npt.NDArray[np.uint8]


class TextOptions(Settings):
    """How text is cut into samples."""

    sequence: int = Field(default=128, ge=1)
    """Bytes per sample."""
    max_bytes: int | None = Field(default=None, ge=1)
    """How much of the text is used, from its beginning; none: all of a file, 4 MB of the standard library."""


def load_text(path: Path | None, options: TextOptions) -> Dataset:
    """Return the windows of a file's bytes, or of the standard library's without a path.

    Raises UsageError for a file that cannot be read, InputError for a text that is too short for `sequence`.
    """
    name = "the standard library" if path is None else str(path)
    text = _standard_library(options.max_bytes or STANDARD_LIBRARY_BYTES) if path is None else _map_file(path)
    text = text[: options.max_bytes]
    start = len(text) - len(text) // 10
    train, validation = text[:start], text[start:]
    if len(validation) <= options.sequence:
        raise InputError(
            f"{name}: of its {len(text)} bytes, the last {len(validation)} are for validation, too few for a window of "
            f"{options.sequence} + 1; set data.options.sequence to a smaller size"
        )
    return Dataset(
        name="text",
        train=_windows(train, options.sequence),
        validation=_windows(validation, options.sequence),
        num_classes=BYTE_VALUES,
    )


def _windows(text: Bytes, sequence: int) -> Split:
    windows = np.lib.stride_tricks.sliding_window_view(text, sequence + 1)[::sequence]
    return Split(inputs=windows[:, :-1], targets=windows[:, 1:], has_ids=True)


def _map_file(path: Path) -> Bytes:
    """Return a file's bytes without reading them: the ranks of a machine use one copy, the system's."""
    try:
        if not path.stat().st_size:
            raise InputError(f"{path}: holds nothing")
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise UsageError(f"data.path: {path}: cannot be read: {error.strerror or error}") from None


def _standard_library(max_bytes: int) -> Bytes:
    """Return the source of the top-level modules, one after the other by name.

    Only what every Python of a version has: not its packages' tests, nor what a distribution adds.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for name in sorted(sys.stdlib_module_names):
        file = folder / f"{name}.py"
        if len(text) < max_bytes and file.is_file():
            text += file.read_bytes()
    if not text:
        raise UsageError(f"data.path: this Python has no source of its standard library in {folder}; give a text file")
    return np.frombuffer(bytes(text[:max_bytes]), dtype=np.uint8)
