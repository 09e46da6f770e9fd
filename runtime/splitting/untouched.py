"""A context that leaves modules as they were, whatever their forwards change: weights, buffers, attributes, generators.

    forward:   self.b.copy_(−mean)    self.done = True    self.seen.append(x)    torch.rand(4)
    after:     as before              as before           as before              drawn from the same state again

Objects of other classes that modules have as attributes are not looked into.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..comm.device import fork_generators

_MAPPINGS = (dict, OrderedDict, defaultdict)
_ROWS = (list, set, deque)


@contextmanager
def untouched(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Leave modules and torch's global generators after a `with` as they were before; weights are copied for that."""
    tensors: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    holders: dict[int, tuple[Any, list[Any]]] = {}
    for module in modules:
        _note(module.__dict__, tensors, holders)
    devices = {p.device for module in modules for p in module.parameters()} - {torch.device("meta")}
    with fork_generators(min(devices, key=lambda device: device.type == "cpu", default=torch.device("cpu"))):
        try:
            yield
        finally:
            for holder, before in holders.values():
                _put_back(holder, before)
            for tensor, storage, numbers in tensors.values():
                tensor.data = storage
                _put_back_numbers(storage, numbers)


def _note(
    value: Any, tensors: dict[int, tuple[Tensor, Tensor, Tensor]], holders: dict[int, tuple[Any, list[Any]]]
) -> None:
    """Note what a value is, and what it holds; each is kept alive, so that no other has its id."""
    if isinstance(value, Tensor):
        if id(value) not in tensors and not is_lazy(value):
            tensors[id(value)] = (value, value.data, value.detach().clone())
    elif isinstance(value, nn.Module):
        _note(value.__dict__, tensors, holders)
    elif type(value) is tuple:
        for item in value:
            _note(item, tensors, holders)
    elif type(value) in (*_MAPPINGS, *_ROWS) and id(value) not in holders:
        holders[id(value)] = (value, _items(value))
        for item in list(value.values()) if isinstance(value, dict) else list(value):
            _note(item, tensors, holders)


def _items(holder: Any) -> list[Any]:
    """Return what a holder holds, flat: keys and values of a mapping, one after the other."""
    return [part for pair in holder.items() for part in pair] if isinstance(holder, dict) else list(holder)


def _put_back(holder: Any, before: list[Any]) -> None:
    now = _items(holder)
    if len(now) == len(before) and all(map(is_, now, before)):
        return
    holder.clear()
    if isinstance(holder, dict):
        holder.update(zip(before[::2], before[1::2], strict=True))
    elif isinstance(holder, set):
        holder.update(before)
    else:
        holder.extend(before)


@torch.no_grad()
def _put_back_numbers(storage: Tensor, numbers: Tensor) -> None:
    if not storage.is_meta and not torch.equal(storage, numbers):
        storage.copy_(numbers)
