"""The IDX format of MNIST and its siblings, gzipped or not, read strictly.

    00 00 08 03 │ images │ rows │ columns │ one byte per pixel …          big-endian 32-bit numbers
    00 00 08 01 │ labels │ one byte per label …

Source: http://yann.lecun.com/exdb/mnist (the section "file formats").
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from quintsched.errors import InputError, UsageError

GZIP_MAGIC = b"\x1f\x8b"
UNSIGNED_BYTE = 8
READ_SIZE = 1 << 20

Bytes = npt.NDArray[np.uint8]


def read_image_label_pair(folder: Path, images: str, labels: str) -> tuple[Bytes, Bytes]:
    """Return the images (N, rows, columns) and their labels (N,), uint8, of two files of `folder`.

    `images` and `labels` are names such as "train-images-idx3-ubyte"; see `find_idx` for the spellings.
    Raises InputError that names the file for each fault, UsageError where a file is missing.
    """
    images_path, labels_path = find_idx(folder, images), find_idx(folder, labels)
    pixels, classes = read_idx(images_path, dims=3), read_idx(labels_path, dims=1)
    if len(pixels) != len(classes):
        raise InputError(f"{labels_path}: {len(classes)} labels, but {images_path.name} holds {len(pixels)} images")
    return pixels, classes


def find_idx(folder: Path, name: str) -> Path:
    """Return the file `name` of `folder`, gzipped or not, also in the spelling "train-images.idx3-ubyte".

    Raises UsageError that says what was looked for.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such directory; it should hold the IDX files {name}[.gz] and so on")
    dotted = name.replace("-idx", ".idx")
    candidates = [name, f"{name}.gz", dotted, f"{dotted}.gz"]
    for candidate in candidates:
        if (folder / candidate).is_file():
            return folder / candidate
    raise UsageError(f"{folder}: none of these files is there: {', '.join(candidates)}")


def read_idx(path: Path, dims: int) -> Bytes:
    """Return the uint8 array with `dims` dimensions that an IDX file holds, gzipped or not.

    Raises InputError for a broken file, UsageError for one that cannot be opened.
    """
    try:
        with path.open("rb") as file:
            zipped = file.peek(2)[:2] == GZIP_MAGIC
            stream = gzip.GzipFile(fileobj=file) if zipped else file
            return _parse(path, stream, dims)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: the gzip data is broken or cut short: {error}") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None


def _parse(path: Path, stream: BinaryIO | gzip.GzipFile, dims: int) -> Bytes:
    """Return the array in `stream`; the shape its header claims is believed only when the bytes are there."""
    header_size = 4 + 4 * dims
    header = stream.read(header_size)
    magic = bytes([0, 0, UNSIGNED_BYTE, dims])
    if header[:4] != magic[: len(header)] or not header:
        raise InputError(f"{path}: starts with {header[:4].hex(' ') or 'nothing'}, not with IDX's {magic.hex(' ')}")
    if len(header) < header_size:
        raise InputError(f"{path}: ends after {len(header)} bytes, within its header of {header_size} bytes")
    shape = struct.unpack(f">{dims}I", header[4:])
    if 0 in shape:
        raise InputError(f"{path}: holds nothing, its header says {_sizes(shape)}")
    content = _read_up_to(stream, math.prod(shape))
    if len(content) != math.prod(shape):
        found = "more" if len(content) > math.prod(shape) else f"only {len(content)} bytes"
        raise InputError(f"{path}: its header says {_sizes(shape)} = {math.prod(shape)} bytes, but it holds {found}")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _read_up_to(stream: BinaryIO | gzip.GzipFile, size: int) -> bytearray:
    """Read to the end of `stream`, but stop soon after `size` bytes: neither a header nor a bomb fills the memory."""
    content = bytearray()
    while len(content) <= size and (block := stream.read(min(READ_SIZE, size - len(content) + 1))):
        content += block
    return content


def _sizes(shape: tuple[int, ...]) -> str:
    return " x ".join(str(size) for size in shape)
