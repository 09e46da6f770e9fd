"""What a job says of its checkpoints: where, how often, in which format; and what is measured once for all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from quintsched.errors import InputError
from quintsched.files.atomic import whole_path, write_whole, writing
from quintsched.files.plain import read_plain
from quintsched.files.strictjson import parse_strict

from ...settings.job import CheckpointConfig
from ..write_tensors import WHAT
from .checkpoints import Checkpoints
from .opening import COSTS

MOST_COSTS = 2**20
"""The longest file of costs that is read, in bytes."""


def checkpoints_of(config: CheckpointConfig, patience_s: float) -> Checkpoints | None:
    """Return the checkpoints of a job, in the format that it names; None where it saves nothing.

    Their folder is known from now on by its whole path: whatever becomes of the current directory, it is the same.
    """
    if config.dir is None:
        return None
    return Checkpoints(whole_path(config.dir), config.keep, config.background, patience_s, config.format)


def remembered_costs(directory: Path, blocks: int, measure: Callable[[], list[float]]) -> list[float]:
    """Return what each of the blocks costs, as it was once measured for a folder; what `measure` gives at first.

    Raises `InputError` for a file that holds something else, or the costs of another number of blocks.
    """
    path = directory / COSTS
    if path.exists():
        found = parse_strict(read_plain(path, "the costs", MOST_COSTS))
        if not isinstance(found, list) or not all(isinstance(number, float) for number in found):
            raise InputError(f"{path}: it must hold a list of numbers; remove it to measure anew")
        if len(found) != blocks:
            raise InputError(f"{path}: it has {len(found)} costs, but there are {blocks} blocks; remove it")
        return found
    numbers = measure()
    with writing(path, WHAT):
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(numbers), WHAT, durable=True)
    return numbers
