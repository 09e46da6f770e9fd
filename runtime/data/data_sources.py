"""Sources of data sets: scikit-learn's digits, a directory of IDX files, text, token shards, or a user's function.

The IDX format of MNIST and its siblings, gzipped or not, read strictly.

    00 00 08 03 │ images │ rows │ columns │ one byte per pixel …          big-endian 32-bit numbers
    00 00 08 01 │ labels │ one byte per label …

Source: http://yann.lecun.com/exdb/mnist (the section "file formats").

Text, byte by byte: a file, or the source of Python's standard library, which is always available.

    bytes      │ d e f · f ( x ) : │ …            windows of `sequence` = 4, one next to the other:
    inputs     │ d e f · │ f ( x ) │              every byte of a split but its first is predicted once
    targets    │ e f · f │ ( x ) : │

The last tenth of the bytes is for validation. Windows are views of the bytes; only batches are copied.
"""

from __future__ import annotations

import gzip
import math
import struct
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from pydantic import Field

from quintsched.check_call_arguments import shown
from quintsched.errors import InputError, UsageError, counted, suggest
from quintsched.import_user_code import call_object, load_object, names_file

from ..settings.engine_settings import Settings, read_settings
from ..settings.job_file import DataConfig
from ..user_objects.library_or_user import arguments_of
from .memory_dataset import BatchSampler, Dataset, Normalization, Split
from .token_mixture import TokenOptions, load_tokens
from .token_sample_order import TokenDataset
from .user_loaders import Loaders, is_map_style

BUILT_IN = ("digits", "mnist", "text", "tokens")

DIGITS = Normalization(mean=4.884, std=6.017)
"""Normalization of the 0…16 grey values of scikit-learn's digits."""

MNIST = Normalization(mean=0.1307 * 255, std=0.3081 * 255)
"""Normalization of the 0…255 grey values of MNIST."""


def load_dataset(config: DataConfig, replica: int = 0, num_replicas: int = 1) -> Dataset | TokenDataset | Loaders:
    """Return the data set of a job, or the loaders of one replica.

    A user's function is passed the options by name, `path` where one is set, and `replica` and `num_replicas` if it
    takes them; it returns a Dataset, a loader, or Loaders. "text" is the file at the path, "tokens" the folder of token
    shards there. Any other name with a path means the MNIST files in that directory; "digits" without one is
    scikit-learn's.
    Raises UsageError for an unknown name, for unused options and for files that are missing, InputError for
    broken files.
    """
    with config.naming_source("data"):
        if names_file(config.name):
            return _load_user(config, {"replica": replica, "num_replicas": num_replicas})
        return _load_built_in(config)


def _load_built_in(config: DataConfig) -> Dataset | TokenDataset:
    path = None if config.path is None else Path(config.path)
    if config.name == "text":
        return load_text(path, read_settings(TextOptions, config.options, "", prefix="data.options"))
    if config.name == "tokens":
        return load_tokens(config.path, token_options(config))
    if config.name not in BUILT_IN:
        own = "; a function of yours is my_file.py:load"
        raise UsageError(f"data.name: there is no data set {config.name!r}{suggest(config.name, BUILT_IN)}{own}")
    if config.options:
        raise UsageError(f"data.options: {config.name!r} has no options, but there is: {', '.join(config.options)}")
    if path is not None:
        return _load_idx(path)
    if config.name == "mnist":
        raise UsageError("data.path: 'mnist' needs the directory that holds its IDX files")
    return _load_digits()


def token_options(config: DataConfig) -> TokenOptions:
    """Return the options of token shards; raises UsageError for wrong ones."""
    with config.naming_source("data"):
        return read_settings(TokenOptions, config.options, "", prefix="data.options")


def has_extras(config: DataConfig) -> bool:
    """Whether a data set comes with extras, which all ranks need: those of other stages too."""
    return config.name == "tokens" and token_options(config).mask_documents


def knows_replica(config: DataConfig) -> bool:
    """Whether the data come from a user's function that takes the number of its replica."""
    return names_file(config.name) and bool(_taken(config) & {"replica", "num_replicas"})


def _taken(config: DataConfig) -> set[str]:
    """Return the parameter names of a user's function."""
    function = load_object(config.name)
    return set(arguments_of(function)) if callable(function) else set()


def _load_user(config: DataConfig, replicas: Mapping[str, int]) -> Dataset | Loaders:
    path = {} if config.path is None else {"path": config.path}
    asked = {name: number for name, number in replicas.items() if name in _taken(config)}
    found = call_object(config.name, **{**asked, **config.options, **path})
    if isinstance(found, Dataset | Loaders):
        return found
    if is_map_style(found):
        return Loaders(found)
    if isinstance(found, tuple | list) and len(found) == 2 and all(map(is_map_style, found)):
        return Loaders(*found)
    if not isinstance(found, Iterable) or isinstance(found, str | bytes | Mapping | Iterator):
        raise UsageError(
            f"data.name: {config.name} returned {shown(found)}; return a data set of torch, a pair of them for "
            "training and validation, a loader, or a Dataset or Loaders of quintsched.runtime.data"
        )
    return Loaders(found)


def _load_idx(folder: Path) -> Dataset:
    splits: list[Split] = []
    for split in ("train", "t10k"):
        images, labels = read_image_label_pair(folder, f"{split}-images-idx3-ubyte", f"{split}-labels-idx1-ubyte")
        if splits and images.shape[1:] != splits[0].inputs.shape[2:]:
            raise InputError(f"{folder}: the images of train and of t10k differ in size")
        splits.append(Split(inputs=images[:, None], targets=labels.astype(np.int64), normalization=MNIST))
    train, validation = splits
    num_classes = 1 + int(max(train.targets.max(), validation.targets.max()))
    return Dataset(name=folder.name, train=train, validation=validation, num_classes=num_classes)


def _load_digits() -> Dataset:
    places = getattr(find_spec("sklearn"), "submodule_search_locations", None)
    if not places:
        raise UsageError(
            "data.name: 'digits' comes with scikit-learn, which is not installed; "
            "pip install 'quintsched[examples]', or set data.path to a directory with MNIST's files"
        )
    # the file that `load_digits` reads: an import of the library takes all ranks a second
    table = np.loadtxt(Path(places[0], "datasets", "data", "digits.csv.gz"), delimiter=",")
    images, targets = table[:, :-1].astype(np.float32).reshape(-1, 1, 8, 8), table[:, -1].astype(np.int64)
    order = next(BatchSampler(num_samples=len(targets), batch_size=len(targets)).batches(epoch=0))
    train, validation = (
        Split(inputs=images[rows], targets=targets[rows], normalization=DIGITS)
        for rows in np.split(order, [len(order) * 4 // 5])
    )
    return Dataset(name="digits", train=train, validation=validation, num_classes=10)


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

    Raises UsageError with the names that were tried.
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
    """Return the array in `stream`; the shape in its header is trusted only when the bytes are there."""
    header_size = 4 + 4 * dims
    header = stream.read(header_size)
    magic = bytes([0, 0, UNSIGNED_BYTE, dims])
    if header[:4] != magic[: len(header)] or not header:
        raise InputError(f"{path}: starts with {header[:4].hex(' ') or 'nothing'}, not with IDX's {magic.hex(' ')}")
    if len(header) < header_size:
        raise InputError(
            f"{path}: ends after {counted(len(header), 'byte')}, within its header of {counted(header_size, 'byte')}"
        )
    shape = struct.unpack(f">{dims}I", header[4:])
    if 0 in shape:
        raise InputError(f"{path}: holds nothing, its header says {_sizes(shape)}")
    content = _read_up_to(stream, math.prod(shape))
    if len(content) != math.prod(shape):
        found = "more" if len(content) > math.prod(shape) else f"only {counted(len(content), 'byte')}"
        raise InputError(
            f"{path}: its header says {_sizes(shape)} = {counted(math.prod(shape), 'byte')}, but it holds {found}"
        )
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _read_up_to(stream: BinaryIO | gzip.GzipFile, size: int) -> bytearray:
    """Read to the end of `stream`, but stop soon after `size` bytes: neither a header nor a bomb fills the memory."""
    content = bytearray()
    while len(content) <= size and (block := stream.read(min(READ_SIZE, size - len(content) + 1))):
        content += block
    return content


def _sizes(shape: tuple[int, ...]) -> str:
    return " x ".join(str(size) for size in shape)


BYTE_VALUES = 256
STANDARD_LIBRARY_BYTES = 4_000_000
"""Most bytes that are read of the standard library."""


class TextOptions(Settings):
    """Options of text samples."""

    sequence: int = Field(default=128, ge=1)
    """Bytes per sample."""
    max_bytes: int | None = Field(default=None, ge=1)
    """Bytes of the text that are used, from its beginning; none: all of a file, 4 MB of the standard library."""


def load_text(path: Path | None, options: TextOptions) -> Dataset:
    """Return the windows of a file's bytes, or of the standard library's without a path.

    Raises UsageError for a file that cannot be read, and for a `sequence` that is too long for it.
    """
    name = "the standard library" if path is None else str(path)
    text = _standard_library(options.max_bytes or STANDARD_LIBRARY_BYTES) if path is None else _map_file(path)
    text = text[: options.max_bytes]
    start = len(text) - len(text) // 10
    train, validation = text[:start], text[start:]
    if len(validation) <= options.sequence:
        raise UsageError(
            f"{name}: of its {counted(len(text), 'byte')}, the last {len(validation)} are for validation, too few for "
            f"a window of {options.sequence} + 1; set data.options.sequence to a smaller size"
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
    """Return a file's bytes without reading them: the ranks of a machine share the system's page cache."""
    try:
        if not path.stat().st_size:
            raise InputError(f"{path}: holds nothing")
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise UsageError(
            f"data.path: {path}: cannot be read: {error.strerror or error}"
            f"{'; data.name: tokens reads a folder of token shards' if path.is_dir() else ''}"
        ) from None


def _standard_library(max_bytes: int) -> Bytes:
    """Return the source of the top-level modules, one after the other by name.

    Only modules that every Python of a version has: not its packages' tests, nor additions of a distribution.
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
