"""Steps from graphs on a CPU: engines that have them, beside the same without.

A graph notes the operations of a step with the memory that they work in, and does them again. As with a CUDA graph, a
replay works in the same memory, the host's numbers stay as they were, and whoever asks for a number or copies from the
host while it is captured is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import quintsched as qs
from quintsched.runtime import Engine, plan_requirements
from quintsched.runtime.interpreter import cuda_graphs
from quintsched.runtime.train.built_in_losses import correct_sum, cross_entropy_sum
from tests.runtime.toys import ids_task, sgd, tiny_gpt

STEPS, SAMPLES, LENGTH = 8, 8, 8
Step = Callable[[Engine, int, Tensor, Tensor], Any]
aten = torch.ops.aten
ASKS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.is_nonzero.default}
COPIES = {aten.lift_fresh.default, aten.lift_fresh_copy.default}

UNSAID = ("running_mean", "running_var")
"""Arguments that are written to, though their operation does not say so."""


class OpTape(TorchDispatchMode):
    """Notes operations in the order in which they run."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[tuple[Any, Any, Any, list[Any]]] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Note what runs; behind it, memory that was there before has what it had."""
        with self:
            yield
        with torch.no_grad():
            for memory, before in self._before.values():
                memory.copy_(before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ASKS:
            raise RuntimeError("operation not permitted when stream is capturing")
        if func in COPIES:
            raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture")
        self._keep(func, args, kwargs or {})
        made = func(*args, **(kwargs or {}))
        given = {storage_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        fresh = [
            leaf if isinstance(leaf, Tensor) and storage_of(leaf) not in given else None for leaf in tree_leaves(made)
        ]
        self._made.update(storage_of(leaf) for leaf in fresh if leaf is not None)
        # without a graph, so that what autograd would do to them later does not reach the tape
        alias = tree_map_only(Tensor, Tensor.detach, (args, kwargs or {}))
        self._noted.append((func, *alias, [None if leaf is None else leaf.detach() for leaf in fresh]))
        return made

    def _keep(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep what is in the memory that an operation writes to, where that was there before."""
        for number, argument in enumerate(func._schema.arguments):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if not is_written and argument.name not in UNSAID:
                continue
            written = args[number] if number < len(args) else kwargs.get(argument.name)
            for leaf in tree_leaves(written):
                if isinstance(leaf, Tensor) and storage_of(leaf) not in self._made | self._before.keys():
                    whole = torch.empty(0, dtype=torch.uint8).set_(leaf.untyped_storage())
                    self._before[storage_of(leaf)] = whole, whole.clone()

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, places in self._noted:
            for place, result in zip(places, tree_leaves(func(*args, **kwargs)), strict=True):
                if place is not None:
                    place.copy_(result)


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def tapes(monkeypatch: pytest.MonkeyPatch) -> list[OpTape]:
    """Let the CPU have graphs; returns those that are made."""
    made: list[OpTape] = []

    def new() -> OpTape:
        made.append(OpTape())
        return made[-1]

    for module in (plan_requirements, cuda_graphs):
        monkeypatch.setattr(module, "graphs_of", lambda device: new)
    return made


def plainly(engine: Engine, number: int, inputs: Tensor, targets: Tensor) -> Any:
    return engine.step(inputs, targets)


def engine_of(plan: qs.Plan | None = None, blocks: Any = None, loss_fn: Any = cross_entropy_sum, **more: Any) -> Engine:
    plan = plan or qs.compile("1f1b", mesh="pp=1", microbatches=4)
    torch.manual_seed(0)
    options = {"dtype": torch.float64, "optimizer": sgd, "metrics": {"right": correct_sum}} | more
    return Engine(plan, blocks or tiny_gpt(LENGTH, depth=2), loss_fn, **options)


def trained(engine: Engine, step: Step = plainly, steps: int = STEPS) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return each step's figures, read when all are done, and weights and buffers after the last."""
    results = [step(engine, number, *batch) for number, batch in enumerate(ids_task(steps, SAMPLES, LENGTH).batches)]
    figures = [torch.stack([r.loss, r.grad_norm, *r.metrics.values(), torch.tensor(r.skipped)]) for r in results]
    return figures, {name: weight.clone() for name, weight in engine.full_weights().items()}


def require_same(make: Callable[..., Engine], step: Step = plainly, steps: int = STEPS) -> list[Engine]:
    """Raise unless steps from graphs have the bits of steps by instructions; returns both engines, trained."""
    engines, results = list[Engine](), list[Any]()
    for is_captured in (True, False):
        engines.append(make(cuda_graph=is_captured))
        results.append(trained(engines[-1], step, steps))
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
    return engines


def with_block(block: Any) -> list[Any]:
    blocks = tiny_gpt(LENGTH, depth=2)
    return [*blocks[:2], block, *blocks[2:]]
