"""Where the first number of a step that is not finite arose, found by running the step again with checks on.

    weights ─▶ inputs, targets ─▶ outputs of block 0, 1, … ─▶ loss ─▶ gradients, from the last block to the first
               per microbatch                                        of what a block is given, and of its weights

Each rank looks at what it holds. Of all findings the first is the one that no other can have caused: weights before
inputs, inputs before what is computed of them, and so on; within these the earliest microbatch, and the earliest block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quintsched.plan import Plan

from ..blocks.blocks import split_result
from ..blocks.dtensor import local_of
from ..blocks.trees import tensors_of
from ..interpreter.tally import Tally
from ..saving.rank_tensors import HeldTensor
from ..stage.batches.microbatches import Batch
from ..stage.rank_model import RankModel
from .recording import ALL, Call, StepWatch

KINDS = ("weights", "inputs", "targets", "activations", "loss", "gradients")
"""What may not be finite, in the order in which one makes the next so."""

LOSS = 2**30
"""Stands for the block behind the last one: the loss function."""

UNKNOWN = 2**30
"""Stands for a unit: what nobody knows the unit of."""


@dataclass(frozen=True)
class NotFinite:
    """Numbers that are not finite.

    Attributes:
        kind: what they are, one of `KINDS`.
        unit: the batch's unit, counted over all replicas; or `ALL`, or `UNKNOWN`.
        block: which block they belong to; `LOSS`; -1: to none.
        what: in words.
        rank: the global rank that found them.
    """

    kind: str
    unit: int
    block: int
    what: str
    rank: int = 0

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Of several findings, the least is the first."""
        along = -self.block if self.kind == "gradients" else self.block
        return KINDS.index(self.kind), self.unit, along, self.rank


def describe(tensor: Tensor) -> str:
    """Say how many numbers of a tensor are not finite: "3 of 64 numbers are nan, 1 is inf"."""
    nans, infinities = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    found = [f"{count} nan" for count in [nans] if count] + [f"{count} inf" for count in [infinities] if count]
    return f"{' and '.join(found)} among {tensor.numel()} numbers"


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers of a tensor are finite; integers are."""
    floats = tensor.is_floating_point() or tensor.is_complex()
    return not floats or bool(tensor.isfinite().all())


class FiniteChecks(StepWatch):
    """Looks at all that one rank makes in a step, for numbers that are not finite.

    `tally` has the losses that were collected so far, and what they weigh; other arguments are those of `StepWatch`.

    Attributes:
        found: what was not finite.
    """

    def __init__(self, plan: Plan, model: RankModel, *held: Any, tally: Tally) -> None:
        super().__init__(plan, model, *held)
        self._tally, self._num_blocks = tally, len(model.outlines)
        self.found: list[NotFinite] = []

    def look_at_weights(self) -> None:
        """Look at the weights that the step begins with."""
        for held in self._held():
            if isinstance(held.tensor, nn.Parameter) and held.numbers is not None:
                numbers = local_of(held.numbers.detach())
                self._look_at(numbers, "weights", ALL, _block_of(held), f"{held.name}: ")

    def look_at_batch(self, batch: Batch) -> None:
        """Look at what the rank is given."""
        for kind, units in (("inputs", batch.inputs), ("targets", batch.targets), ("inputs", batch.extras)):
            for unit, given in enumerate(units):
                for tensor in tensors_of(given):
                    self._look_at(tensor, kind, self._first_unit + unit, -1)

    def _look_at(self, tensor: Tensor, kind: str, unit: int, block: int, words: str = "") -> None:
        if not is_finite(tensor):
            self.found.append(NotFinite(kind, unit, block, f"{words}{describe(tensor)}"))

    def _run(self, unit: int, is_forward: bool, call: Call) -> None:
        of_losses = (self._tally.losses, "the loss is"), (self._tally.weights, "the weight that it gives is")
        known = [len(numbers) for numbers, _ in of_losses]
        super()._run(unit, is_forward, call)
        for count, (numbers, words) in zip(known, of_losses, strict=True):
            for _, number in numbers[count:]:
                if not is_finite(torch.as_tensor(number)):
                    what = f"{words} {float(number)}"
                    self.found.append(NotFinite("loss", self._first_unit + unit, LOSS, what))

    def _look_at_sum(self, held: HeldTensor, gradient: Tensor) -> None:
        """Look at a sum of gradients: nobody knows of which unit it comes."""
        self._look_at(local_of(gradient), "gradients", UNKNOWN, _block_of(held), f"gradient of {held.name}: ")

    def _handles(self, number: str, block: nn.Module, *, is_last: bool) -> Iterator[Any]:
        yield block.register_forward_hook(partial(self._gave, int(number), is_last))
        for name, parameter in block.named_parameters():
            if parameter.requires_grad:
                look = partial(self._look_at_gradient, int(number), f"gradient of its {name}: ", None)
                yield parameter.register_hook(look)

    def _gave(self, number: int, is_last: bool, block: nn.Module, given: Any, result: Any) -> None:
        unit = self._unit
        output, riders, loss = split_result(result)
        gives = [*tensors_of(output), *riders.values()]
        if self._is_forward:
            for tensor in gives:
                self._look_at(tensor, "activations", unit, number, "its output: ")
            if loss is not None:
                self._look_at(loss, "loss", unit, number, "the loss that it returns: ")
        taken = "gradient of what it is given: "
        behind = (LOSS, taken) if number + 1 == self._num_blocks else (number + 1, taken)
        if is_last and number + 1 < self._num_blocks:  # who takes it is elsewhere, and looks at what it sends back
            behind = number, "gradient of its output, which was finite as the next stage sent it: "
        for (at, words), tensors in (((number, taken), tensors_of(given)), (behind, gives)):
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._look_at_gradient, at, words, unit))

    def _look_at_gradient(self, number: int, words: str, unit: int | None, gradient: Tensor) -> None:
        self._look_at(local_of(gradient), "gradients", self._unit if unit is None else unit, number, words)


def _block_of(held: HeldTensor) -> int:
    return int(held.name.partition(".")[0])
