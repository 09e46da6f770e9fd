"""What a step makes, written down on one rank: outputs of blocks, gradients, weights, the loss.

    Fwd(stage, microbatch)    each block of the stage ──hook──▶ output of block 3, microbatch 5
    first OptStep             gradients, as the optimizers get them, by the boxes of the full tensors that are here
    after the step            weights and buffers, by their boxes; loss and norm

Every rank writes down all that it holds, copies included: replicas that drift apart differ from one process as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from quintsched.ir import instructions as ins
from quintsched.ir.instructions import Instruction

from ..blocks.blocks import split_result
from ..blocks.dtensor import local_of
from ..blocks.trees import tensors_of
from ..interpreter.tally import StepResult
from ..saving.rank_tensors import HeldTensor
from ..stage.build import Stage
from ..state.master_weights import Masters

BEFORE = -1
"""The step of the weights that a training starts from."""

Kind = Literal["output", "gradient", "weight", "figure"]
Call = Callable[[], None]


@dataclass(frozen=True)
class Made:
    """A tensor, or a part of one, that a step made.

    Attributes:
        name: of outputs the block's number; else the name of the weight or buffer in the whole model.
        unit: of outputs, which of the batch's units made it, counted over all replicas; else 0.
        place: which tensor of a block's output, of several.
        offsets: where a part begins in the full tensor; None for outputs, which are laid out as their rank is.
    """

    step: int
    kind: Kind
    name: str
    tensor: Tensor
    unit: int = 0
    place: int = 0
    offsets: tuple[int, ...] | None = None


@dataclass
class Recording:
    """What one rank made in some steps.

    Attributes:
        rank: its global rank.
        coordinates: where it is in the mesh.
        figures: loss and norm of each step.
    """

    rank: int
    coordinates: dict[str, int]
    made: list[Made] = field(default_factory=list)
    figures: list[dict[str, float]] = field(default_factory=list)

    def note_output(self, step: int, name: str, unit: int, output: Any) -> None:
        """Write down what a block gave of a unit."""
        for place, tensor in enumerate(tensors_of(split_result(output)[0])):
            kept = tensor.detach().to("cpu", copy=True)
            self.made.append(Made(step, "output", name, kept, unit=unit, place=place))


class StepObserver:
    """Writes down one step of a rank while it runs; `with observer.watching(): …` around it.

    Args:
        program: the rank's instructions.
        first_unit: the number of this replica's first unit among those of all.
        stages, masters, held: what the rank holds.
        recording: where it is written down.
    """

    def __init__(
        self,
        program: Sequence[Instruction],
        first_unit: int,
        stages: Mapping[int, Stage],
        masters: Masters,
        held: Callable[[], Iterable[HeldTensor]],
        recording: Recording,
    ) -> None:
        self._program, self._first_unit = program, first_unit
        self._stages, self._masters, self._held, self._recording = stages, masters, held, recording
        self._unit: int | None = None
        self._step = len(recording.figures)
        self._has_gradients = False

    def wrap(self, index: int, call: Call) -> Call:
        """Return what is called instead of one of the calls of an instruction."""
        instruction = self._program[index]
        forward = next((side for side in instruction.sides if isinstance(side, ins.Fwd)), None)
        if forward is not None:
            return partial(self._run_forward, forward.microbatch, call)
        return partial(self._run_step, call) if isinstance(instruction, ins.OptStep) else call

    def _run_forward(self, unit: int, call: Call) -> None:
        self._unit = self._first_unit + unit
        try:
            call()
        finally:
            self._unit = None

    def _run_step(self, call: Call) -> None:
        if not self._has_gradients:
            self._has_gradients = True
            for held in self._held():
                master = self._masters.of(held.tensor) if isinstance(held.tensor, nn.Parameter) else None
                if master is not None and master.grad is not None:
                    self._note("gradient", held, master.grad)
        call()

    def _note(self, kind: Kind, held: HeldTensor, numbers: Tensor, step: int | None = None) -> None:
        numbers = local_of(numbers.detach())
        for box in held.placement.boxes(numbers if held.placement.span is None else numbers.view(-1)):
            kept = box.numbers.detach().to("cpu", copy=True)
            number = self._step if step is None else step
            self._recording.made.append(Made(number, kind, held.name, kept, offsets=box.offsets))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which blocks show what they give."""
        handles = [
            block.register_forward_hook(partial(self._gave, name))
            for stage in self._stages.values()
            for name, block in stage.blocks.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _gave(self, name: str, block: nn.Module, given: Any, output: Any) -> None:
        if self._unit is not None:  # else a forward that is run again
            self._recording.note_output(self._step, name, self._unit, output)

    def end(self, result: StepResult) -> None:
        """Write down what the step came to."""
        norm = math.nan if result.grad_norm is None else result.grad_norm.item()
        self._recording.figures.append({"loss": result.loss.item(), "grad_norm": norm})

    def note_weights(self, step: int | None = None) -> None:
        """Write down the weights as they are now, as those after this step, or another."""
        for held in self._held():
            if held.numbers is not None:
                self._note("weight", held, held.numbers, step)
