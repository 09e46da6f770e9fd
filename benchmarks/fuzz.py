"""Fuzzing of all file readers with broken files: no traceback, at most 1 s and 256 MB each.

    python benchmarks/fuzz.py --inputs 1000000 --processes 2        some hours; faults are listed at the end
    python benchmarks/fuzz.py --inputs 20000 --readers plan job

A process per share of the inputs; the system limits its memory. Each fault is written to --faults, to be read again.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
import warnings
from collections import Counter
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.fuzz.harness import feed, limited_memory  # noqa: E402
from tests.fuzz.mutator import Mutator  # noqa: E402
from tests.fuzz.readers import READERS  # noqa: E402

SHARE = 2000
Found = tuple[Counter[str], float, int, dict[str, bytes]]


def fuzz(name: str, first: int, count: int) -> Found:
    """Feed inputs number `first` on to a reader; return kinds, longest time, bytes, and faults by their messages."""
    warnings.simplefilter("error")
    reader = READERS[name]
    mutator, kinds, slowest, size = Mutator(reader.seeds(), first, stays_json=reader.stays_json), Counter[str](), 0.0, 0
    faults: dict[str, bytes] = {}
    with limited_memory():
        for _ in range(count):
            data = mutator.make()
            found = feed(reader.read, data)
            kinds[found.kind] += 1
            slowest, size = max(slowest, found.seconds), size + len(data)
            if found.kind == "fault" and len(faults) < 20:
                faults.setdefault(found.words, data)
    return kinds, slowest, size, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=20000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first input: others give other inputs")
    parser.add_argument("--readers", nargs="+", choices=list(READERS), default=list(READERS))
    parser.add_argument("--faults", type=Path, default=Path("fuzz_faults"))
    arguments = parser.parse_args()
    each, bad, began = arguments.inputs // len(arguments.readers), 0, time.monotonic()
    with get_context("spawn").Pool(arguments.processes, maxtasksperchild=8) as pool:
        for name in arguments.readers:
            starts = range(arguments.first, arguments.first + each, SHARE)
            shares = [
                pool.apply_async(fuzz, (name, start, min(SHARE, arguments.first + each - start))) for start in starts
            ]
            kinds, slowest, size = Counter[str](), 0.0, 0
            for share in shares:
                some, longest, length, faults = share.get()
                kinds, slowest, size = kinds + some, max(slowest, longest), size + length
                bad += _keep(arguments.faults / name, faults)
            print(
                f"{name:<12}{sum(kinds.values()):>9} inputs {size / 1e6:>9.1f} MB {kinds['good']:>9} read "
                f"{kinds['refused']:>9} refused {kinds['fault']:>6} faults  slowest {slowest:.2f} s",
                flush=True,
            )
    print(f"{time.monotonic() - began:.0f} s")
    return int(bad > 0)


def _keep(folder: Path, faults: dict[str, bytes]) -> int:
    """Write faults to files; return their number."""
    for words, data in faults.items():
        folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(data).hexdigest()[:12]
        (folder / f"{name}.txt").write_text(words)
        (folder / name).write_bytes(data)
    return len(faults)


if __name__ == "__main__":
    sys.exit(main())
