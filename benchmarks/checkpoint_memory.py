"""Rise of a rank's resident memory while a checkpoint is saved and loaded, relative to the state that it holds.

    python benchmarks/checkpoint_memory.py                    2 GB of weights and Adam's state, of one rank
    python benchmarks/checkpoint_memory.py --blocks 8         less
    python benchmarks/checkpoint_memory.py --dir /mnt/scratch another disk

The peak of each is `VmHWM` in /proc, reset before it begins: Linux only. Targets: a rise of at most
1.2 times the rank's state for a save in the background, whose buffer stays, and of 0.2 times where training waits
for the save, and while loading, on the same mesh or on another. glibc is set to return memory as soon as it is
freed (MALLOC_MMAP_THRESHOLD_), so that the figure is the memory that the runtime asks for.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.saving.checkpoints.save_and_load_checkpoints import Checkpoints, Format, OpenCheckpoints

THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
WIDTH = 2048
FORMATS = ("native", "dcp")
MOST = {"saved in the background": 1.2, "saved and waited for": 0.2, "loaded": 0.2, "loaded by another plan": 0.2}


def engine_of(transport: Transport, blocks: int, microbatches: int) -> Engine:
    """Return an engine that has made a step."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(blocks)]
    plan = qs.compile("1f1b", mesh="pp=1", microbatches=microbatches)
    engine = Engine(plan, layers, F.mse_loss, lambda p: torch.optim.Adam(p, foreach=False), transport=transport)
    x = torch.randn(2, WIDTH)
    engine.step(x, x)
    return engine


def status(name: str) -> int:
    """Return a figure of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def risen(work: Callable[[], object]) -> int:
    """Return the peak rise in resident bytes during a call."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def measure(blocks: int, folder: Path, format: Format) -> tuple[int, dict[str, int]]:
    """Return the bytes that a rank holds, and the rise of each kind of save or load."""
    found: dict[str, int] = {}

    def save(transport: Transport) -> int:
        engine = engine_of(transport, blocks, 1)
        for name, background in (("saved and waited for", False), ("saved in the background", True)):
            with Checkpoints(folder / name, 1, background, format=format).opened(engine.saves) as saves:

                def write(saves: OpenCheckpoints = saves) -> None:
                    saves.save_step(1, {})
                    saves.finish_save()

                found[name] = risen(write)
        return sum(tensor.nbytes for tensor in engine.state_dict().values())

    def load(transport: Transport, microbatches: int, name: str) -> None:
        engine = engine_of(transport, blocks, microbatches)
        with Checkpoints(folder / "saved and waited for", 1, format=format).opened(engine.saves, "resume") as saves:

            def read() -> None:
                newest = saves.newest_whole()
                assert newest is not None
                newest.load_step()

            found[name] = risen(read)

    (held,) = run_local(1, save)
    run_local(1, lambda transport: load(transport, 1, "loaded"))
    run_local(1, lambda transport: load(transport, 2, "loaded by another plan"))
    return held, found


def main() -> int:
    """Measure, and print a line for each; return 1 where one rises too far."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40, help="layers of 17 MB; Adam keeps two more of each")
    parser.add_argument("--dir", default=None, help="where to save; default: the system's temporary folder")
    parser.add_argument("--format", choices=FORMATS, default="native")
    given = parser.parse_args()
    if THRESHOLD not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {THRESHOLD: str(2**20)})
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        held, found = measure(given.blocks, Path(folder), given.format)
    for name, bytes_risen in found.items():
        ratio = bytes_risen / held
        sys.stdout.write(f"{name}: {held / 1e9:.2f} GB are held, {ratio:.2f} times as much more was resident\n")
    return int(any(found[name] > most * held for name, most in MOST.items()))


if __name__ == "__main__":
    sys.exit(main())
