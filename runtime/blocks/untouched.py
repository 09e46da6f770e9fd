"""Blocks run beside the training, to find shapes or to prove something, and nothing is left of it.

attributes    self.calls += 1, self.table = …, self.cache["cos"] = …       as before, in the same containers
tensors       buffers and weights, and tensors in attributes               the numbers from before
generators    torch's, Python's, numpy's                                    as before
graphs        none, but while a block runs that differentiates in its forward, as gradient penalties and forces do:

    slope, = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)   "does not require grad" without one
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ..comm.device import AllGenerators, draws_undone
from .blocks import split_result
from .trees import DIFFERENTIABLE, map_tensors

Found = TypeVar("Found")

Result = tuple[tuple[Any, dict[str, Tensor], Tensor | None], bool]
"""What a block gave (see `split_result`), without a graph, and whether it wanted one."""

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


@contextmanager
def attributes_untouched(module: nn.Module) -> Iterator[None]:
    """A context after which the attributes of a module and of those in it are as before, on any device.

    So are dicts, lists and sets in them, modules in these, and the numbers of tensors there that are no weights.
    """
    before = _Attributes(module)
    try:
        yield
    finally:
        before.put_back()


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """A context after which a module whose weights are resident is as before, and so are the global generators.

    Objects of other classes that modules have as attributes are not looked into.
    """
    device = next((weight.device for weight in module.parameters() if weight.device.type not in ("cpu", "meta")), None)
    with draws_undone(device):
        before = Kept(module)
        try:
            yield
        finally:
            before.put_back()


class Kept:
    """A module as it is now, and the global generators.

    Args:
        module: its weights are resident.
        device: whose generator is kept as well; None: that of its weights.
    """

    def __init__(self, module: nn.Module, device: torch.device | None = None) -> None:
        held = (*module.parameters(), *module.buffers())
        plain = [tensor for tensor in held if not isinstance(tensor, DTensor) and not is_lazy(tensor)]
        self._numbers = [(tensor, tensor.data, tensor.detach().clone()) for tensor in plain]
        devices = {parameter.device for parameter in module.parameters()} - {torch.device("cpu"), torch.device("meta")}
        self._generators = AllGenerators(next(iter(devices), None) if device is None else device)
        self._attributes = _Attributes(module)

    def put_back(self) -> None:
        """Let all be as it was."""
        for tensor, memory, before in self._numbers:
            memory.copy_(before)
            if tensor.data_ptr() != memory.data_ptr():
                tensor.data = memory
        self._attributes.put_back()
        self._generators.put_back()


class _Attributes:
    """The attributes of a module and of those in it, with the containers and tensors in these.

    Most of a module's containers are empty, as those of hooks are: whether they still are is asked of all at once.
    """

    def __init__(self, module: nn.Module) -> None:
        self._empty: list[Any] = []
        self._filled: list[tuple[Any, Any]] = []
        self._numbers: list[Callable[[], None]] = []
        self._seen: set[int] = set()
        for child in module.modules():
            self._remember(child.__dict__)

    def put_back(self) -> None:
        """Let all be as it was, in its order."""
        if any(self._empty):
            for container in self._empty:
                container.clear()
        for container, before in self._filled:
            _put_back(container, before)
        for restore in self._numbers:
            restore()

    def _remember(self, found: Any) -> None:
        """Keep what a value has now, and what is in it."""
        if id(found) in self._seen:
            return
        self._seen.add(id(found))
        if isinstance(found, Tensor):
            self._remember_numbers(found)
        elif isinstance(found, nn.Module):
            self._remember(found.__dict__)
        elif type(found) is tuple:
            for value in found:
                self._remember(value)
        elif type(found) in _CONTAINERS and not found:
            self._empty.append(found)
        elif type(found) in _CONTAINERS:
            before = found.copy()
            self._filled.append((found, before))
            for value in before.values() if isinstance(before, dict) else before:
                self._remember(value)

    def _remember_numbers(self, tensor: Tensor) -> None:
        """Keep the numbers of a tensor, where it is one of torch's own with memory of its own."""
        if type(tensor) is not Tensor or tensor.is_meta or tensor.layout is not torch.strided or tensor.is_inference():
            return
        if tensor.untyped_storage().size() == 0:
            return
        before, version = tensor.detach().clone(), tensor._version

        def restore() -> None:
            if tensor._version != version:
                tensor.detach().copy_(before)

        self._numbers.append(restore)


def _put_back(container: Any, before: Any) -> None:
    """Let a container have what it had, in its order."""
    kept = len(container) == len(before) and all(map(is_, container, before))
    if kept and (not isinstance(before, dict) or all(map(is_, container.values(), before.values()))):
        return
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(before)


def run_block(run: Callable[[Any, Mapping[str, Any]], Any], given: Any, taken: Mapping[str, Any]) -> Result:
    """Run a block of which no gradients are needed; with a graph if it asks for one."""
    return run_alone(lambda arguments: split_result(run(*arguments)), (given, dict(taken)))


def run_alone(run: Callable[[Any], Found], given: Any) -> tuple[Found, bool]:
    """Return what a call gives of which no gradients are needed, without a graph, and whether it asked for one.

    Where graphs are switched off around it, it is for who has done that to run it again.
    """
    may_have_one = torch.is_grad_enabled()
    try:
        with torch.no_grad():
            return run(given), False
    except Exception as error:
        if not (may_have_one and asks_for_graph(error)):
            raise
    return detached(run(as_leaves(given))), True


def asks_for_graph(error: Exception) -> bool:
    """Whether a call may have failed only since no graph was recorded."""
    return "grad" in str(error) or isinstance(error, AssertionError)


def as_leaves(tree: Any) -> Any:
    """Return a tree whose tensors can be differentiated by, as far as their types can."""
    return map_tensors(lambda t: t.detach().requires_grad_() if t.dtype in DIFFERENTIABLE else t, tree)


def detached(tree: Any) -> Any:
    """Return a tree whose tensors have no graph."""
    return map_tensors(Tensor.detach, tree)
