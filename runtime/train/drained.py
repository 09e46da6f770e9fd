"""Loops over loaders of unequal length: who has no more batches takes part without samples, until nobody has any.

replica 0    batch 0   batch 1   batch 2   end
replica 1    batch 0   (none)    (none)    end           the numbers are those of one process with four batches' samples
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from quintsched.errors import UsageError

from ..engine import Engine
from ..stage.batches.microbatches import without_samples


def drained(loader: Iterable[Any] | None, engine: Engine) -> Iterator[Any]:
    """Yield a loader's batches, then batches of no samples, until no rank's loader has any more (collective).

    All ranks loop over this, each over its own loader, and do the same in every turn: step, evaluate, save. Each turn
    begins with a reduction of one number over all ranks.

    Args:
        loader: this rank's; None on a rank that needs no data: it yields (None, None).
        engine: what the batches are for.

    Raises `UsageError` where a rank that needs data has no batch at all.
    """
    batches, nothing = iter(loader or ()), None
    while True:
        batch = next(batches, None)
        if not any(engine.everyone.add(float(batch is not None))):
            return
        if batch is not None:
            nothing = without_samples(batch) if nothing is None else nothing
            yield batch
        elif nothing is not None or loader is None:
            yield (None, None) if nothing is None else nothing
        else:
            raise UsageError("this rank's loader has no batch at all; give each replica one at least")
