"""Count of calls of this package's own functions in one steady training step, by file: the software cost of a step.

quintsched   one step of 1F1B on rank 0 of pp=2,dp=2, four microbatches, four linear blocks, clipping, AdamW
counted      call events of `sys.setprofile` in files of the package, in all threads of the rank
before, between, after    the first instruction that computes, up to the last, and from there on

python benchmarks/own_calls.py            the sums
python benchmarks/own_calls.py --files    and the number in each file
python benchmarks/own_calls.py --order    every call, in order
python benchmarks/own_calls.py --first    of `Engine.__init__` and of the first step, by room and by function
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.runtime import Engine, run_local

ROOT = Path(__file__).resolve().parents[1]
OWN = tuple(f"{ROOT / name}{os.sep}" for name in ("quintsched", "runtime"))
WIRE = os.path.join("runtime", "comm", "local")
STEPS, WIDTH, SAMPLES, MICROBATCHES = 4, 8, 16, 4
MOST_SHOWN = 60

Call = tuple[str, str]
"""File, from the root, and name of a function."""


@contextmanager
def counting(calls: list[Call]) -> Iterator[None]:
    """Record the calls of own functions in this thread, and in threads that it starts, within a context."""

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            path = str(Path(os.path.realpath(frame.f_code.co_filename)).relative_to(ROOT))
            if not path.startswith(WIRE):
                calls.append((path, frame.f_code.co_qualname))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def calls_of_a_step(steps: int = STEPS, **more: Any) -> list[Call]:
    """Return the own calls of the last of some steps, in order."""
    return _calls_of_a_run(steps, **more)[-1]


def calls_at_first() -> list[list[Call]]:
    """Return the own calls of `Engine.__init__`, and those of the first step, in a process that has run one before.

    A first run fills the caches that threads share, so that no race decides whose calls those are.
    """
    _calls_of_a_run(1)
    return _calls_of_a_run(1)


def _calls_of_a_run(steps: int, **more: Any) -> list[list[Call]]:
    """Return the own calls of rank 0 as it builds an engine, and in each of some steps."""
    plan = qs.compile("1f1b", mesh="pp=2,dp=2", microbatches=MICROBATCHES)
    calls: list[list[Call]] = [[] for _ in range(steps + 1)]
    started = threading.Barrier(plan.mesh.size)

    def rank(transport: Any) -> None:
        counted = (counting(each) if transport.rank == 0 else nullcontext() for each in calls)
        blocks = [lambda: nn.Linear(WIDTH, WIDTH)] * 4
        adam = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)  # noqa: E731
        started.wait()  # threads of other ranks begun from here on would be counted
        with next(counted):
            engine = Engine(plan, blocks, F.mse_loss, adam, clip=1.0, transport=transport, **more)
        for step in range(steps):
            inputs, targets = torch.randn(2, SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))
            with next(counted):
                engine.step(inputs, targets)

    gc.collect()
    gc.disable()  # finalizers of earlier engines would be counted
    try:
        run_local(plan.mesh.size, rank)
    finally:
        gc.enable()
    return calls


_COMPUTING = tuple(f"runtime/interpreter/handlers/{name}_handlers.py" for name in ("forward", "backward"))


def parts_of(calls: list[Call]) -> tuple[int, int, int]:
    """Return the number of calls before the first forward, from there to the last backward, and after it."""
    computing = [place for place, (path, _) in enumerate(calls) if path.startswith(_COMPUTING)]
    return computing[0], computing[-1] - computing[0], len(calls) - computing[-1]


def _print_by_room(name: str, calls: list[Call]) -> None:
    rooms = Counter("/".join(Path(path).with_suffix("").parts[:2]) for path, _ in calls)
    print(f"{name}: {len(calls)} own calls")
    for counted in (rooms.most_common(), Counter(calls).most_common(MOST_SHOWN)):
        print(
            "\n".join(
                f"{number:>6}  {place if isinstance(place, str) else ' '.join(place)}" for place, number in counted
            )
        )


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="how many calls are in each file")
    parser.add_argument("--order", action="store_true", help="every call, in order")
    parser.add_argument("--first", action="store_true", help="those of building the engine, and of the first step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.first:
        for name, found in zip(("Engine.__init__", "the first step"), calls_at_first(), strict=True):
            _print_by_room(name, found)
        return
    calls = calls_of_a_step()
    if arguments.order:
        for path, name in calls:
            print(f"{path:<60}{name}")
    if arguments.files:
        for path, number in Counter(path for path, _ in calls).most_common():
            print(f"{number:>6}  {path}")
    before, between, after = parts_of(calls)
    print(f"{before} before the first forward, {between} to the last backward, {after} after it")
    print(f"{len(calls)} own calls in {len({path for path, _ in calls})} files")


if __name__ == "__main__":
    main()
