"""Blocks run beside the training, to find shapes or to prove something, and nothing is left of it.

attributes    self.calls += 1, self.table = …, self.cache["cos"] = …       as before, in the same containers
tensors       buffers and weights, and tensors in attributes               the numbers from before
generators    torch's                                                      as before
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

Undo = Callable[[], None]

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


@contextmanager
def attributes_untouched(module: nn.Module) -> Iterator[None]:
    """A context after which the attributes of a module and of those in it are as before, on any device.

    So are dicts, lists and sets in them, modules in these, and the numbers of tensors there that are no weights.
    """
    undo, seen = list[Undo](), set[int]()
    for child in module.modules():
        _remember(child.__dict__, undo, seen)
    try:
        yield
    finally:
        for step in undo:
            step()


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """A context after which a module whose weights are resident is as before, and so are torch's generators.

    Objects of other classes that modules have as attributes are not looked into.
    """
    held = (*module.parameters(), *module.buffers())
    plain = [tensor for tensor in held if not isinstance(tensor, DTensor) and not is_lazy(tensor)]
    kept = [(tensor, tensor.data, tensor.detach().clone()) for tensor in plain]
    devices = {parameter.device for parameter in module.parameters()} - {torch.device("cpu"), torch.device("meta")}
    others: dict[str, Any] = {"devices": []}
    if devices:
        others = {"devices": [*devices], "device_type": next(iter(devices)).type}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(**others))
        stack.enter_context(attributes_untouched(module))
        try:
            yield
        finally:
            for tensor, memory, before in kept:
                memory.copy_(before)
                if tensor.data_ptr() != memory.data_ptr():
                    tensor.data = memory


def _remember(found: Any, undo: list[Undo], seen: set[int]) -> None:
    """Add what puts a value back, and what is in it."""
    if id(found) in seen:
        return
    seen.add(id(found))
    if isinstance(found, Tensor):
        _remember_numbers(found, undo)
    elif isinstance(found, nn.Module):
        _remember(found.__dict__, undo, seen)
    elif type(found) is tuple:
        for value in found:
            _remember(value, undo, seen)
    elif type(found) in _CONTAINERS:
        before = found.copy()
        undo.append(lambda: _put_back(found, before))
        for value in before.values() if isinstance(before, dict) else before:
            _remember(value, undo, seen)


def _put_back(container: Any, before: Any) -> None:
    """Let a container have what it had, in its order."""
    if _identities(container) == _identities(before):
        return
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(before)


def _identities(container: Any) -> list[tuple[object, int]]:
    if isinstance(container, dict):
        return [(key, id(value)) for key, value in container.items()]
    return [(None, id(value)) for value in container]


def _remember_numbers(tensor: Tensor, undo: list[Undo]) -> None:
    """Add what puts the numbers of a tensor back, where it is one of torch's own with memory of its own."""
    if type(tensor) is not Tensor or tensor.is_meta or tensor.layout is not torch.strided or tensor.is_inference():
        return
    if tensor.untyped_storage().size() == 0:
        return
    before, version = tensor.detach().clone(), tensor._version

    def restore() -> None:
        if tensor._version != version:
            tensor.detach().copy_(before)

    undo.append(restore)
