"""A CUDA library with the kernels of one kind of GPU alone, so that it packs small: NCCL's, 344 MB, into 43 MB.

    python benchmarks/gpu_parts/one_architecture.py libnccl.so.2 90 small.so.2 && xz -9 small.so.2

The kernels of other kinds become zeros, in place, so that nothing else in the file moves; the driver never reads them
where it finds those of its own kind.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)
HEADER, ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ")
"""Of a fat binary: magic, version, own size, size of entries. Of an entry: kind, version, own size, size of code."""
OFFSET_OF_ARCHITECTURE = 28
MACHINE_CODE = 2


def entries(library: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yield kind, architecture, beginning and end of each piece of code of a library."""
    at = 0
    while (at := library.find(MAGIC, at)) >= 0:
        _, version, header, size = HEADER.unpack_from(library, at)
        if version != 1 or header != HEADER.size:
            at += len(MAGIC)
            continue
        at, end = at + header, at + header + size
        while at < end:
            kind, _, own, code = ENTRY.unpack_from(library, at)
            (architecture,) = struct.unpack_from("<I", library, at + OFFSET_OF_ARCHITECTURE)
            yield kind, architecture, at + own, at + own + code
            at += own + code


def keep_one(library: bytes, architecture: int) -> bytes:
    """Return the library with zeros for all code but that of an architecture, such as 90.

    Raises ValueError where it has none of that.
    """
    found, left = [*entries(library)], bytearray(library)
    if (MACHINE_CODE, architecture) not in {(kind, its) for kind, its, _, _ in found}:
        raise ValueError(f"no code for {architecture}: there is {sorted({its for _, its, _, _ in found})}")
    for kind, its, begin, end in found:
        if (kind, its) != (MACHINE_CODE, architecture):
            left[begin:end] = bytes(end - begin)
    return bytes(left)


if __name__ == "__main__":
    source, architecture, target = sys.argv[1:]
    Path(target).write_bytes(keep_one(Path(source).read_bytes(), int(architecture)))
