"""Support for torch's own DataLoader and its samplers, whose order is determined by generators alone.

DataLoader ── batch_sampler ── sampler ─▶ indices of a batch ─▶ samples, read in this process or by workers
                                └ advanced alone: skipped batches are not read
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from quintsched.errors import CodeError

WORKER_ENDS_S = 10.0
"""Longest time that a worker takes to end after it has hung up."""

_KNOWN = (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


def samplers_of(loader: Any) -> list[Any]:
    """Return the samplers of a loader, if any."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    return [sampler for sampler in found if sampler is not None]


def with_epochs(loader: Any) -> list[Any]:
    """Return its samplers whose order depends on the number of the epoch."""
    found = {id(sampler): sampler for sampler in samplers_of(loader) if hasattr(sampler, "set_epoch")}
    return list(found.values())


def refusal_of_position(loader: Any, *, goes_on: bool) -> str | None:
    """Return the reason why batches are not determined by a position in a pass; None: they are.

    They are for a list, and for torch's DataLoader over a map-style data set, in an order that depends only on
    the generators' states at the start of the pass, and on the epoch. With `goes_on`, `set_epoch` is never called.
    """
    if type(loader) in (list, tuple):
        return None
    if type(loader) is not DataLoader:
        return "it is not torch's DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return f"its data set, a {type(loader.dataset).__name__}, has no index"
    if loader.persistent_workers:
        return "its workers outlive an epoch (persistent_workers), and draw on where nobody sees it"
    told = () if goes_on else with_epochs(loader)
    odd = [one for one in samplers_of(loader) if type(one) not in _KNOWN and one not in told]
    return f"the order of its sampler, a {type(odd[0]).__name__}, follows from no epoch (set_epoch)" if odd else None


def skipped(batches: Iterator[Any]) -> object:
    """Skip a batch; where no worker reads it, only its indices are computed; None: there is none."""
    if getattr(batches, "_num_workers", 1) or not hasattr(batches, "_next_index"):
        return next(batches, None)
    try:
        return batches._next_index()
    except StopIteration:
        return None


@contextmanager
def naming_workers() -> Iterator[None]:
    """Raise `CodeError` where a DataLoader worker ended while its batch was fetched within a context.

    Torch reports one that crashed or was killed. One that ends by `SystemExit` only shows as a lost connection.
    """
    try:
        yield
    except (OSError, EOFError) as error:
        ended = _ended_workers(error)
        if not ended:
            raise
        raise CodeError(
            f"DataLoader worker ({', '.join(ended)}) ended before its batch was there ({type(error).__name__}); let "
            "its dataset raise an error rather than exit"
        ) from error


def _ended_workers(error: BaseException) -> list[str]:
    """Return pid and exit code of workers that have ended, where an error arose in the connection to one."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    waits = [frame.f_locals["self"] for frame in frames if frame.f_code.co_name == "_try_get_data"]
    if not waits or "multiprocessing" not in str(frames[-1].f_globals.get("__name__")):
        return []
    workers = waits[-1]._workers
    hung_up = wait([worker.sentinel for worker in workers], WORKER_ENDS_S)
    ended = [worker for worker in workers if worker.sentinel in hung_up]
    for worker in ended:  # its pipe closes a moment before its exit code is known
        worker.join(WORKER_ENDS_S)
    return [f"pid {one.pid}, exit code {one.exitcode}" for one in ended]
