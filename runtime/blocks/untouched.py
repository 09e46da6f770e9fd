"""Blocks run beside the training, to find shapes or to prove something, and nothing is left of it.

attributes    self.calls += 1, Block.calls += 1, a global, a cache          as before, in the same containers
tensors       buffers and weights, and tensors in attributes               the numbers from before
gradients     of weights and of other tensors that collect them              as before
generators    torch's, Python's, numpy's, and those that code has          as before
modes         gradients on, autocast, …                                    as before; a block may leave no others
graphs        none, but while a block runs that differentiates in its forward, as gradient penalties and forces do:

    slope, = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)   "does not require grad" without one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from contextvars import copy_context
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ..comm.device import draws_undone, fork_generators
from ..comm.modes import modes_kept
from ..objects.grad_switches import GradSwitches
from ..objects.snapshot import Snapshot
from ..objects.spaces import is_of_torch
from .blocks import split_result
from .trees import DIFFERENTIABLE, map_tensors

Found = TypeVar("Found")

Result = tuple[tuple[Any, dict[str, Tensor], Tensor | None], bool]
"""What a block gave (see `split_result`), without a graph, and whether it wanted one."""


@contextmanager
def attributes_untouched(module: nn.Module) -> Iterator[Snapshot]:
    """A context after which all that a module's code can change is as before but for weights, on any device."""
    changes_nothing = is_of_torch(module) and next(module.buffers(), None) is None
    before = Snapshot({} if changes_nothing else {"": module})
    try:
        with modes_kept():
            yield before
    finally:
        before.put_back()


@contextmanager
def untouched(module: nn.Module, kept: Kept | None = None) -> Iterator[Kept]:
    """A context after which a module whose weights are resident is as before, and so are the global generators.

    `kept` is what it is like now, if that is known, as in one trial of many.
    """
    device = next((weight.device for weight in module.parameters() if weight.device.type not in ("cpu", "meta")), None)
    with draws_undone(device), nullcontext() if device is None else fork_generators(device):
        before = Kept(module) if kept is None else kept
        try:
            with modes_kept():
                yield before
        finally:
            before.put_back()


class Kept:
    """A module or a function as it is now, with what its code names.

    Args:
        root: of a module the weights are resident.

    Attributes:
        snapshot: all but weights.
    """

    def __init__(self, root: Any) -> None:
        plain = [tensor for tensor in self._held_by(root) if not isinstance(tensor, DTensor) and not is_lazy(tensor)]
        self._weights = [(tensor, tensor.data, tensor.detach().clone()) for tensor in plain]
        self.snapshot = Snapshot({"": root})
        leaves = [tensor for _, tensor in self.snapshot.tensors() if tensor.is_leaf and tensor.requires_grad]
        self._grads = [(t, t.grad, *_numbers_of(t.grad)) for t in leaves]

    def _held_by(self, root: Any) -> list[nn.Parameter]:
        """Return the weights whose numbers are noted."""
        return [*root.parameters()] if isinstance(root, nn.Module) else []

    def put_back(self) -> None:
        """Let all be as it was."""
        for tensor, memory, before in self._weights:
            memory.copy_(before)
            if tensor.data_ptr() != memory.data_ptr():
                tensor.data = memory
        for leaf, grad, numbers, version in self._grads:
            leaf.grad = grad
            if grad is not None and numbers is not None and grad._version != version:
                grad.detach().copy_(numbers)  # what a reduction under way writes has no versions, and is to stay
        self.snapshot.put_back()


def _numbers_of(grad: Tensor | None) -> tuple[Tensor | None, int]:
    return (None, 0) if grad is None else (grad.clone(), grad._version)


def run_block(run: Callable[[Any, Mapping[str, Any]], Any], given: Any, taken: Mapping[str, Any], name: str) -> Result:
    """Run a block of which no gradients are needed; with a graph if it asks for one."""
    return run_alone(lambda arguments: split_result(run(*arguments)), (given, dict(taken)), name)


def run_alone(run: Callable[[Any], Found], given: Any, name: str) -> tuple[Found, bool]:
    """Return what a call gives of which no gradients are needed, without a graph, and whether it asked for one.

    Where graphs are switched off around it, it is for who has done that to run it again. What it puts into context
    variables is gone behind it.

    Raises `ModesLeftError` for a call that leaves the modes of torch changed. Whether it leaves gradients switched off
    shows only where they are on: one that switches them by hand runs once more.
    """
    with modes_kept() as around:
        try:
            with torch.no_grad(), GradSwitches() as switches:
                found, records = copy_context().run(run, given), False
        except Exception as error:
            if not (around.grad and asks_for_graph(error)):
                raise
            found, records = detached(copy_context().run(run, as_leaves(given))), True
        around.require_kept(name)
        if around.grad and switches.unpaired and not records:
            with suppress(RuntimeError, ValueError):
                copy_context().run(run, map_tensors(Tensor.clone, given))
                around.require_kept(name)
        return found, records


@contextmanager
def tensors_of_training() -> Iterator[None]:
    """A context in which tensors that are made count their versions, and may be part of a graph later."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def asks_for_graph(error: Exception) -> bool:
    """Whether a call may have failed only since no graph was recorded."""
    return "grad" in str(error) or isinstance(error, AssertionError)


def as_leaves(tree: Any) -> Any:
    """Return a tree whose tensors can be differentiated by, as far as their types can."""
    return map_tensors(lambda t: t.detach().requires_grad_() if t.dtype in DIFFERENTIABLE else t, tree)


def detached(tree: Any) -> Any:
    """Return a tree whose tensors have no graph."""
    return map_tensors(Tensor.detach, tree)
