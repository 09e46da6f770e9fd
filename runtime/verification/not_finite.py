"""Where the first number of a step that is not finite arose, found by running the step again with checks on.

    weights ─▶ inputs, targets ─▶ outputs of block 0, 1, … ─▶ loss ─▶ gradients, from the last block to the first
               per microbatch                                        of what a block is given, and of its weights

Each rank looks at what it holds. Of all findings the first is the one that no other can have caused: weights before
inputs, inputs before what is computed of them, and so on; within these the earliest microbatch, and the earliest block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quintsched.ir import instructions as ins
from quintsched.ir.instructions import Instruction

from ..blocks.blocks import split_result
from ..blocks.dtensor import local_of
from ..blocks.trees import tensors_of
from ..saving.rank_tensors import HeldTensor
from ..stage.batches.microbatches import Batch
from ..stage.build import Stage

Call = Callable[[], None]

KINDS = ("weights", "inputs", "targets", "activations", "loss", "gradients")
"""What may not be finite, in the order in which one makes the next so."""

LOSS = 2**30
"""Stands for the block behind the last one: the loss function."""

ALL, UNKNOWN = -1, 2**30
"""Stand for a unit: what belongs to all of them, and what nobody knows the unit of."""


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

    def to_data(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def describe(tensor: Tensor) -> str:
    """Say how many numbers of a tensor are not finite: "3 of 64 numbers are nan, 1 is inf"."""
    nans, infinities = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    found = [f"{count} nan" for count in [nans] if count] + [f"{count} inf" for count in [infinities] if count]
    return f"{' and '.join(found)} among {tensor.numel()} numbers"


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers of a tensor are finite; integers are."""
    floats = tensor.is_floating_point() or tensor.is_complex()
    return not floats or bool(tensor.isfinite().all())


class FiniteChecks:
    """Looks at all that one rank makes in a step; `with checks.watching(): …` around it.

    Args:
        program: the rank's instructions.
        first_unit: the number of this replica's first unit among those of all.
        stages: what the rank holds.
        num_blocks: how many the whole model has.
        losses, loss_weights: the losses that were collected so far, and what they weigh, by unit.
        weights: returns the weights that the rank holds, and what its optimizer steps of each.

    Attributes:
        found: what was not finite.
    """

    def __init__(
        self,
        program: Sequence[Instruction],
        first_unit: int,
        stages: Mapping[int, Stage],
        num_blocks: int,
        losses: Sequence[tuple[int, Tensor | float]],
        loss_weights: Sequence[tuple[int, Tensor | float]],
        weights: Callable[[], Iterable[tuple[HeldTensor, nn.Parameter | None]]],
    ) -> None:
        self._program, self._first_unit, self._stages, self._losses = program, first_unit, stages, losses
        self._loss_weights, self._num_blocks, self._weights = loss_weights, num_blocks, weights
        self._has_gradients = False
        self._unit, self._is_forward = ALL, False
        self.found: list[NotFinite] = []

    def look_at_weights(self) -> None:
        """Look at the weights that the step begins with."""
        for held, _ in self._weights():
            if held.numbers is not None and not is_finite(local_of(held.numbers.detach())):
                self._note("weights", ALL, _block_of(held), f"{held.name}: {describe(local_of(held.numbers))}")

    def look_at_batch(self, batch: Batch) -> None:
        """Look at what the rank is given."""
        for kind, units in (("inputs", batch.inputs), ("targets", batch.targets), ("inputs", batch.extras)):
            for unit, given in enumerate(units):
                for tensor in tensors_of(given):
                    if not is_finite(tensor):
                        self._note(kind, self._first_unit + unit, -1, describe(tensor))

    def wrap(self, index: int, call: Call) -> Call:
        """Return what is called instead of one of the calls of an instruction."""
        if isinstance(self._program[index], ins.OptStep):
            return partial(self._run_step, call)
        sides = [side for side in self._program[index].sides if isinstance(side, ins.Compute)]
        forward = next((side for side in sides if isinstance(side, ins.Fwd)), None)
        side = forward or next(iter(sides), None)
        if side is None:
            return call
        return partial(self._run, side.microbatch, forward is not None, call)

    def _run(self, unit: int, is_forward: bool, call: Call) -> None:
        self._unit, self._is_forward = self._first_unit + unit, is_forward
        known, weighed = len(self._losses), len(self._loss_weights)
        try:
            call()
        finally:
            self._unit = ALL
        for _, loss in self._losses[known:]:
            if not is_finite(torch.as_tensor(loss)):
                self._note("loss", self._first_unit + unit, LOSS, f"the loss is {float(loss)}")
        for _, weight in self._loss_weights[weighed:]:
            if not is_finite(torch.as_tensor(weight)):
                self._note("loss", self._first_unit + unit, LOSS, f"the weight that it gives is {float(weight)}")

    def _run_step(self, call: Call) -> None:
        """Look at the sums of gradients before they are stepped by; nobody knows of which unit they come."""
        if not self._has_gradients:
            self._has_gradients = True
            for held, master in self._weights():
                if master is not None and master.grad is not None and not is_finite(local_of(master.grad)):
                    self._note("gradients", UNKNOWN, _block_of(held), f"gradient of {held.name}")
        call()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which blocks show what they are given and what they give, and their gradients."""
        handles = [
            handle
            for stage in self._stages.values()
            for number, block in stage.blocks.items()
            for handle in self._handles(int(number), block, is_last=int(number) == max(map(int, stage.blocks)))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _handles(self, number: int, block: nn.Module, *, is_last: bool) -> Iterator[Any]:
        """Yield the hooks of a block, which may be the last one of its stage."""
        yield block.register_forward_hook(partial(self._gave, number, is_last))
        for name, parameter in block.named_parameters():
            if parameter.requires_grad:
                yield parameter.register_hook(partial(self._look_at_gradient, number, f"gradient of its {name}", None))

    def _gave(self, number: int, is_last: bool, block: nn.Module, given: Any, result: Any) -> None:
        unit = self._unit
        output, riders, loss = split_result(result)
        gives = [*tensors_of(output), *riders.values()]
        if self._is_forward:
            for tensor in gives:
                if not is_finite(tensor):
                    self._note("activations", unit, number, f"its output: {describe(tensor)}")
            if loss is not None and not is_finite(loss):
                self._note("loss", unit, number, f"the loss that it returns is {loss.item()}")
        taken = "gradient of what it is given"
        behind = (LOSS, taken) if number + 1 == self._num_blocks else (number + 1, taken)
        if is_last and number + 1 < self._num_blocks:  # who takes it is elsewhere, and looks at what it sends back
            behind = number, "gradient of its output, which was finite as the next stage sent it"
        for (at, words), tensors in (((number, taken), tensors_of(given)), (behind, gives)):
            for tensor in tensors:
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._look_at_gradient, at, words, unit))

    def _look_at_gradient(self, number: int, words: str, unit: int | None, gradient: Tensor) -> None:
        if not is_finite(local_of(gradient)):
            self._note("gradients", self._unit if unit is None else unit, number, f"{words}: {describe(gradient)}")

    def _note(self, kind: str, unit: int, block: int, what: str) -> None:
        self.found.append(NotFinite(kind, unit, block, what))


def _block_of(held: HeldTensor) -> int:
    return int(held.name.partition(".")[0])
