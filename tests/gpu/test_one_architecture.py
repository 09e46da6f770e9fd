"""The tool that leaves a CUDA library the kernels of one kind of GPU, on a library made here; it needs no GPU."""

import pytest

from benchmarks.gpu_parts.one_architecture import ENTRY, HEADER, MACHINE_CODE, OFFSET_OF_ARCHITECTURE, entries, keep_one

PTX, OWN = 1, 64
"""The kind of code for all GPUs, and the bytes of an entry before its code."""


def binary(*codes: tuple[int, int, bytes]) -> bytes:
    """Return a fat binary of (kind, architecture, code)."""
    body = b""
    for kind, architecture, code in codes:
        entry = bytearray(OWN)
        ENTRY.pack_into(entry, 0, kind, 0, OWN, len(code))
        entry[OFFSET_OF_ARCHITECTURE : OFFSET_OF_ARCHITECTURE + 4] = architecture.to_bytes(4, "little")
        body += bytes(entry) + code
    return HEADER.pack(0xBA55ED50, 1, HEADER.size, len(body)) + body


LIBRARY = (
    b"\x7fELF, host code, "
    + binary((MACHINE_CODE, 80, b"ampere"), (MACHINE_CODE, 90, b"hopper"), (PTX, 120, b"any"))
    + b"more host code, "
    + binary((MACHINE_CODE, 90, b"HOPPER"))
)


def test_other_code_becomes_zeros_and_nothing_moves() -> None:
    small = keep_one(LIBRARY, 90)
    assert small == LIBRARY.replace(b"ampere", bytes(6)).replace(b"any", bytes(3))
    assert [small[begin:end] for kind, its, begin, end in entries(small) if its == 90] == [b"hopper", b"HOPPER"]


def test_a_gpu_without_code_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no code for 100: there is \[80, 90, 120\]"):
        keep_one(LIBRARY, 100)
