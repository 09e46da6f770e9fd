"""Trial runs of blocks outside the training step (shape inference, proofs), whose side effects are all undone.

attributes    self.calls += 1, Block.calls += 1, a global, a cache          restored, in the same containers
tensors       buffers, weights, and tensors in attributes                  restored numbers
gradients     of weights and of other leaf tensors                          restored
generators    torch's, Python's, numpy's, and those that code holds        restored
modes         grad mode, autocast, …                                       restored; a block may leave no others
graphs        none, except for a block that calls autograd in its forward, as gradient penalties and forces do:

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

from ..comm.random_generators import draws_undone, fork_generators
from ..comm.torch_modes import modes_kept
from ..user_objects.grad_switches import GradSwitches
from ..user_objects.object_contents import is_of_torch
from ..user_objects.snapshot import Snapshot
from .block_builders import split_result
from .trees import DIFFERENTIABLE, map_tensors

Result = TypeVar("Result")

BlockResult = tuple[tuple[Any, dict[str, Tensor], Tensor | None], bool]
"""A block's result (see `split_result`), without an autograd graph, and whether the block needed one."""


@contextmanager
def attributes_untouched(module: nn.Module) -> Iterator[Snapshot]:
    """Context that restores all state that a module's code can change, except weights, on any device."""
    changes_nothing = is_of_torch(module) and next(module.buffers(), None) is None
    before = Snapshot({} if changes_nothing else {"": module})
    try:
        with modes_kept():
            yield before
    finally:
        before.put_back()


@contextmanager
def untouched(module: nn.Module, kept: StateCopy | None = None) -> Iterator[StateCopy]:
    """Context that restores a module, weights included (they are resident), and the global generators.

    `kept` is its state now, if the caller has it, as in a series of trials.
    """
    device = next((weight.device for weight in module.parameters() if weight.device.type not in ("cpu", "meta")), None)
    with draws_undone(device), nullcontext() if device is None else fork_generators(device):
        before = StateCopy(module) if kept is None else kept
        try:
            with modes_kept():
                yield before
        finally:
            before.put_back()


class StateCopy:
    """Copy of the state of a module or function, and of the objects that its code names.

    Args:
        root: the module, whose weights must be resident, or the function.

    Attributes:
        snapshot: all state except weights.
    """

    def __init__(self, root: Any) -> None:
        plain = [tensor for tensor in self._held_by(root) if not isinstance(tensor, DTensor) and not is_lazy(tensor)]
        self._weights = [(tensor, tensor.data, tensor.detach().clone()) for tensor in plain]
        self.snapshot = Snapshot({"": root})
        leaves = [tensor for _, tensor in self.snapshot.tensors() if tensor.is_leaf and tensor.requires_grad]
        self._grads = [(t, t.grad, *_numbers_of(t.grad)) for t in leaves]

    def _held_by(self, root: Any) -> list[nn.Parameter]:
        """Return the weights whose numbers are copied."""
        return [*root.parameters()] if isinstance(root, nn.Module) else []

    def put_back(self) -> None:
        """Restore weights, gradients and all other state, in place."""
        for tensor, memory, before in self._weights:
            memory.copy_(before)
            if tensor.data_ptr() != memory.data_ptr():
                tensor.data = memory
        for leaf, grad, numbers, version in self._grads:
            leaf.grad = grad
            if grad is not None and numbers is not None and grad._version != version:
                grad.detach().copy_(numbers)  # a reduction in flight writes without versions: its result stays
        self.snapshot.put_back()


def _numbers_of(grad: Tensor | None) -> tuple[Tensor | None, int]:
    return (None, 0) if grad is None else (grad.clone(), grad._version)


def run_block(
    run: Callable[[Any, Mapping[str, Any]], Any], given: Any, taken: Mapping[str, Any], name: str
) -> BlockResult:
    """Run a block without gradients; with an autograd graph only if its forward needs one."""
    return run_alone(lambda arguments: split_result(run(*arguments)), (given, dict(taken)), name)


def run_alone(run: Callable[[Any], Result], given: Any, name: str) -> tuple[Result, bool]:
    """Return the result of a call without an autograd graph, and whether the call needed one.

    It runs under no_grad, and again with a graph if it fails for lack of one. Where grad mode is already off, the
    error is raised, and rerunning is up to the caller. Context variables that it sets are discarded.

    Raises `ModesLeftError` for a call that leaves torch's modes changed. A call that sets grad mode by hand runs once
    more with grad mode on, since only then does it show whether it leaves it off.
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
    """Context without inference mode: new tensors have version counters, and may join an autograd graph later."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def asks_for_graph(error: Exception) -> bool:
    """Whether a call may have failed only because no autograd graph was recorded."""
    return "grad" in str(error) or isinstance(error, AssertionError)


def as_leaves(tree: Any) -> Any:
    """Return a tree of detached leaf tensors that require gradients, where their dtype can."""
    return map_tensors(lambda t: t.detach().requires_grad_() if t.dtype in DIFFERENTIABLE else t, tree)


def detached(tree: Any) -> Any:
    """Return a tree with its tensors detached from the autograd graph."""
    return map_tensors(Tensor.detach, tree)
