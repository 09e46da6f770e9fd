"""What blocks and functions keep on the host, as plain values: a counter, a rate, a flag, where a generator is.

    before = host_values(modules, functions)
    …                                                     forwards run
    changed(before, host_values(modules, functions))      names of those that keep something which these have changed

Looked at is what `data.reachable` finds from a user's own modules, their hooks, and functions; nothing of libraries'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

from ..agreement.user_code import PLAIN, is_of_library
from ..data.reachable import parts_of, reachable

HostValues = Mapping[str, tuple[Any, ...]]
"""The plain values of each holder, by its name, in the order in which they are found."""

_OF_TORCH = frozenset(vars(nn.Module())) - {"_forward_hooks", "_forward_pre_hooks"}


def host_values(modules: Mapping[str, nn.Module], functions: Mapping[str, Any]) -> HostValues:
    """Return what all modules in `modules`, and `functions`, keep on the host, by names."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, whole in modules.items():
        for inner, module in whole.named_modules():
            if not is_of_library(type(module)):
                holder = f"{name}{inner and '.'}{inner} ({type(module).__name__})"
                found[holder] = tuple(_plain(type(module)))
                own = {key: value for key, value in vars(module).items() if key not in _OF_TORCH}
                found |= {f"{holder}.{key}": tuple(_plain(value)) for key, value in own.items()}
    return found | {name: tuple(_plain(function)) for name, function in functions.items()}


def changed(before: HostValues, after: HostValues) -> list[str]:
    """Return the names of holders whose values are not as before, or that have come or gone."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _plain(holder: Any) -> Iterator[Any]:
    """Yield the plain values that a holder is or reaches."""
    if isinstance(holder, PLAIN):
        yield _told(holder)
        return
    for thing in reachable([holder]):
        if isinstance(thing, count | Random | np.random.Generator | torch.Generator):
            yield _state(thing)
        else:
            yield from (_told(part) for part in parts_of(thing) if isinstance(part, PLAIN))


def _told(value: Any) -> Any:
    """Return a value that is equal to one as it is now, and to no other: 1 is not True, what is no number is itself."""
    return type(value).__name__, repr(value) if isinstance(value, float) else value


def _state(generator: Any) -> str:
    if isinstance(generator, count):
        return repr(generator)
    if isinstance(generator, Random):
        return str(hash(generator.getstate()))
    if isinstance(generator, torch.Generator):
        return str(hash(generator.get_state().numpy().tobytes()))
    return str(generator.bit_generator.state)
