"""What is known of torch's own DataLoader and its samplers, whose order follows from generators alone.

DataLoader ── batch_sampler ── sampler ─▶ indices of a batch ─▶ samples, read in this process or by workers
                                └ advanced alone: batches that nobody wants are not read
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
"""How long a worker that has hung up takes to end, at most."""

_KNOWN = (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


def samplers_of(loader: Any) -> list[Any]:
    """Return the samplers of a loader, as far as it has some."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    return [sampler for sampler in found if sampler is not None]


def with_epochs(loader: Any) -> list[Any]:
    """Return those of its samplers whose order follows from the number of the epoch."""
    found = {id(sampler): sampler for sampler in samplers_of(loader) if hasattr(sampler, "set_epoch")}
    return list(found.values())


def refusal_of_position(loader: Any, *, goes_on: bool) -> str | None:
    """Return why batches do not follow from a position in a pass, in words; None: they do.

    They do where a loader is a list, or torch's DataLoader over a data set with an index, in an order that follows from
    where generators were as the pass began, and from the epoch. With `goes_on`, samplers are not told the epoch.
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
    """Pass over a batch, of which only the indices are found where no worker reads it; None: there is none."""
    if getattr(batches, "_num_workers", 1) or not hasattr(batches, "_next_index"):
        return next(batches, None)
    try:
        return batches._next_index()
    except StopIteration:
        return None


@contextmanager
def naming_workers() -> Iterator[None]:
    """A context that fetches a batch; raises `CodeError` where a worker ended that was to give it.

    Torch tells of one that crashed or was killed. One that ends by `SystemExit` is seen as a lost connection alone.
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
    """Return what is known of workers that have ended, where an error arose in the connection to one."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    waits = [frame.f_locals["self"] for frame in frames if frame.f_code.co_name == "_try_get_data"]
    if not waits or "multiprocessing" not in str(frames[-1].f_globals.get("__name__")):
        return []
    workers = waits[-1]._workers
    hung_up = wait([worker.sentinel for worker in workers], WORKER_ENDS_S)
    ended = [worker for worker in workers if worker.sentinel in hung_up]
    for worker in ended:  # its pipe is closed a moment before its exit code is there
        worker.join(WORKER_ENDS_S)
    return [f"pid {one.pid}, exit code {one.exitcode}" for one in ended]
