"""Blocks run beside the training, with a graph, on what they are given in experiments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..blocks.blocks import accepted_extras, split_result
from ..blocks.trees import DIFFERENTIABLE, tensors_of
from ..comm import Group
from ..parallel.draws.mode import KeyedDraws
from ..parallel.dropout import Masks, Unit
from ..parallel.proof.arrivals import Arrival, Given

Sliced = Callable[[int], Group | None]
RunBlock = Callable[[int, nn.Module, Any, Mapping[str, Any]], Any]
"""Runs a block, which is on this rank, on what it is given."""


class Ran(NamedTuple):
    """A run of a block: what it was given that has gradients, its weights that do; what it gave, and its loss."""

    leaves: Sequence[Tensor]
    weights: Sequence[nn.Parameter]
    made: Sequence[Tensor]
    loss: Tensor | None


@contextmanager
def drawing(masks: Masks, number: int, block: nn.Module, samples: range, sliced: Sliced) -> Iterator[None]:
    """Have a block draw the same each time for these samples, and on all ranks, in its forward and its backward."""
    unit = Unit(0, samples)
    with masks.of(unit), masks.again(unit), KeyedDraws(masks, {number: block}, sliced):
        yield


def run_with_graph(run: RunBlock, number: int, block: nn.Module, arrival: Arrival) -> Ran:
    """Run a block whose weights are resident."""
    accepts, short = accepted_extras(block), next((p.dtype for p in block.parameters() if p.dtype.itemsize < 4), None)

    def leaf(given: Given) -> Tensor:
        tensor = given.tensor.detach()
        tensor = tensor.to(short) if short is not None and tensor.is_floating_point() else tensor
        return tensor.clone().requires_grad_(tensor.dtype in DIFFERENTIABLE)

    activation = arrival.activation.build(leaf)
    riders = {name: leaf(rider) for name, rider in arrival.riders.items()}
    extras = {name: tree.build(lambda given: leaf(given).detach()) for name, tree in arrival.extras.items()}
    taken = {name: value for name, value in {**extras, **riders}.items() if accepts(name)}
    weights = [p for p in block.parameters() if p.requires_grad]
    leaves = [t for t in (*tensors_of(activation), *riders.values()) if t.requires_grad]
    with torch.enable_grad():
        output, fresh, loss = split_result(run(number, block, activation, taken))
    made = [t for t in (*tensors_of(output), *fresh.values()) if t.requires_grad]
    return Ran(leaves, weights, made, loss)
