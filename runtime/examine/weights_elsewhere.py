"""Weights of other stages that a loss or a metric reads: on this rank they stay as they were when the model was built.

    lambda output, targets: mse(output, targets) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())
                                                         on the last stage only its own p are trained: refused

What tells only of shapes and devices, and frozen weights, may be read anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quintsched.errors import MisfitError

_PLAIN = (Tensor, nn.Parameter)


class WeightsElsewhere:
    """The weights of a model that are trained by other ranks alone.

    Args:
        blocks: the whole model; of what is not built yet nobody can read weights.
        here: the modules that this rank trains.
    """

    def __init__(self, blocks: Sequence[Any], here: Iterable[nn.Module]) -> None:
        own = [*here]
        self._own = {module for stage in own for module in stage.modules()}
        built = {number: b for number, b in enumerate(blocks) if isinstance(b, nn.Module) and b not in self._own}
        self._weights = [
            (f"{number}.{name}", ref(parameter))
            for number, block in built.items()
            for name, parameter in block.named_parameters()
            if parameter.requires_grad and type(parameter) in _PLAIN
        ]

    def places(self) -> dict[int, str]:
        """Return where they lie in memory, with their names, "<block>.<name in the block>"."""
        held = {memory for module in self._own for p in module.parameters(recurse=False) for memory in _memory(p)}
        weights = ((name, reference()) for name, reference in self._weights)
        found = ((memory, name) for name, p in weights if p is not None for memory in _memory(p))
        return {memory: name for memory, name in found if memory not in held}


class ReadsElsewhere(TorchDispatchMode):
    """While it is entered, a function's calls are looked through for weights that other ranks train.

    Attributes:
        refusal: why it cannot go by what it reads, in words; "": it reads none.
    """

    def __init__(self, weights: WeightsElsewhere, what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights, self._what, self._places = weights, what, dict[int, str]()
        self.refusal = ""

    def __enter__(self) -> Any:
        self._places = self._weights.places()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if self._places and not (name.startswith("aten::new_") or name.endswith(("_like", "::detach"))):
            places = (place for leaf in tree_leaves((args, kwargs)) for place in _memory(leaf))
            read = next(filter(None, map(self._places.get, places)), None)
            if read is not None and not self.refusal:
                self.refusal = (
                    f"{self._what} goes by {read!r} (<block>.<weight>), which other ranks train: here it stays as it "
                    "was at the start; let the optimizer decay weights (weight_decay=…), let the block that has the "
                    "weight return a loss of it, (output, loss), or take engine.full_weights() between steps"
                )
        return func(*args, **(kwargs or {}))


def require_own_weights(
    blocks: Sequence[nn.Module], stage_of: Mapping[int, int], held: Sequence[Sequence[tuple[str, Tensor]]]
) -> None:
    """Raise `MisfitError` where a block holds, other than in its modules, a weight that another stage trains.

    `held` are the tensors that each block reaches, through lists, closures, methods, weak references and others.
    """
    homes: dict[int, dict[int, str]] = {}
    for number, block in enumerate(blocks):
        for name, weight in block.named_parameters():
            if weight.requires_grad:
                homes.setdefault(_place(weight), {}).setdefault(stage_of[number], f"{number}.{name}")
    for number, tensors in enumerate(held):
        stage = stage_of[number]
        for name, tensor in tensors:
            home = homes.get(_place(tensor), {})
            if home and stage not in home and "_state_dict_" not in name:
                other = min(home)
                raise MisfitError(
                    f"block {number} ({type(blocks[number]).__name__}) on stage {stage} holds {home[other]!r} "
                    f"(<block>.<weight>), which stage {other} trains, as {name.partition(' ')[2] or name!r}, and would "
                    "have it as it was at the start; register its module in the block (split ties what several blocks "
                    "have), hand what it gives on as an argument, or have both blocks on one stage"
                )


def _place(tensor: Tensor) -> int:
    """Return where a tensor's numbers begin, or else which one it is."""
    return next(iter(_memory(tensor)), id(tensor))


def _memory(leaf: Any) -> Iterable[int]:
    """Yield where a plain tensor's numbers begin; nothing of one that has none of its own."""
    if type(leaf) in _PLAIN and leaf.layout is torch.strided and (place := leaf.untyped_storage().data_ptr()):
        yield place
