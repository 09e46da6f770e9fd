"""Recording of the tensors that steps compute on one rank: outputs of blocks, gradients, weights, the loss.

    Fwd(stage, microbatch)    each block of the stage ──hook──▶ output of block 3, microbatch 5
    first OptStep             gradients, as the optimizers get them, by their boxes in the full tensors
    after the step            weights and buffers, by their boxes; loss and norm

Every rank records all tensors that it holds, copies included, so that drifting replicas are detected as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from quintsched.ir import instruction_set as ins
from quintsched.plan import Plan

from ..blocks.block_builders import split_result
from ..blocks.dtensor import local_of
from ..blocks.trees import tensors_of
from ..comm.overlap_threads import BoundCall
from ..interpreter.step_losses.sum_losses_across_ranks import StepResult
from ..saving.rank_tensor_inventory import HeldTensor
from ..stage.rank_stages import RankModel
from ..weights_and_gradients.master_weights import Masters

BEFORE = -1
"""Step number of the weights before the first step."""

ALL_UNITS = -1
"""Unit index of tensors that belong to all units."""

ResultKind = Literal["output", "gradient", "weight", "figure"]


@dataclass(frozen=True)
class Made:
    """Tensor, or a part of one, that a step computed.

    Attributes:
        name: of outputs the block's number; else the name of the weight or buffer in the whole model.
        unit: of outputs, the batch's unit, counted over all replicas; else 0.
        place: index of the tensor among those of a block's output.
        offsets: where a part begins in the full tensor; None for outputs, which are laid out as their rank is.
    """

    step: int
    kind: ResultKind
    name: str
    tensor: Tensor
    unit: int = 0
    place: int = 0
    offsets: tuple[int, ...] | None = None


@dataclass
class StepRecording:
    """Tensors that one rank computed in some steps.

    Attributes:
        rank: its global rank.
        coordinates: its mesh coordinates.
        figures: loss and gradient norm of each step.
    """

    rank: int
    coordinates: dict[str, int]
    made: list[Made] = field(default_factory=list)
    figures: list[dict[str, float]] = field(default_factory=list)

    def note_output(self, step: int, name: str, unit: int, output: Any) -> None:
        """Record a block's output of a unit, copied to the CPU."""
        for place, tensor in enumerate(tensors_of(split_result(output)[0])):
            kept = tensor.detach().to("cpu", copy=True)
            self.made.append(Made(step, "output", name, kept, unit=unit, place=place))


class StepWatch:
    """Observer of one step of a rank: wraps its calls, and hooks its blocks in `with watch.watching(): …`.

    Args:
        plan, model, masters: the plan, this rank's stages, and the master weights.
        held: returns the tensors of the model that the rank holds.
    """

    def __init__(
        self, plan: Plan, model: RankModel, masters: Masters, held: Callable[[], Iterable[HeldTensor]]
    ) -> None:
        self._program, self._stages = plan.programs[model.pp_rank], model.stages
        self._first_unit = model.replica * plan.schedule.num_units
        self._masters, self._held = masters, held
        self._unit, self._is_forward, self._has_gradients = ALL_UNITS, False, False

    def wrap(self, index: int, call: BoundCall) -> BoundCall:
        """Return the call that replaces the call of an instruction."""
        if isinstance(self._program[index], ins.OptStep):
            return partial(self._run_step, call)
        sides = [side for side in self._program[index].sides if isinstance(side, ins.Compute)]
        side = min(sides, key=lambda side: not isinstance(side, ins.Fwd), default=None)
        return call if side is None else partial(self._run, side.microbatch, isinstance(side, ins.Fwd), call)

    def _run(self, unit: int, is_forward: bool, call: BoundCall) -> None:
        self._unit, self._is_forward = self._first_unit + unit, is_forward
        try:
            call()
        finally:
            self._unit, self._is_forward = ALL_UNITS, False

    def _run_step(self, call: BoundCall) -> None:
        """Observe the accumulated gradients before the optimizer steps."""
        if not self._has_gradients:
            self._has_gradients = True
            for held in self._held():
                master = self._masters.master_of(held.tensor) if isinstance(held.tensor, nn.Parameter) else None
                if master is not None and master.grad is not None:
                    self._look_at_sum(held, master.grad)
        call()

    def _look_at_sum(self, held: HeldTensor, gradient: Tensor) -> None:
        raise NotImplementedError

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which the blocks are hooked."""
        with ExitStack() as stack:
            for stage in self._stages.values():
                for number, block in stage.blocks.items():
                    for handle in self._handles(number, block, is_last=int(number) == max(map(int, stage.blocks))):
                        stack.callback(handle.remove)
            yield

    def _handles(self, number: str, block: nn.Module, *, is_last: bool) -> Iterator[Any]:
        """Register hooks on a block, which may be the last one of its stage, and yield their handles."""
        raise NotImplementedError


class StepObserver(StepWatch):
    """Observer that records one step of a rank into `recording`."""

    def __init__(self, *what: Any, recording: StepRecording) -> None:
        super().__init__(*what)
        self._recording, self._step = recording, len(recording.figures)

    def _look_at_sum(self, held: HeldTensor, gradient: Tensor) -> None:
        self._note("gradient", held, gradient, self._step)

    def _note(self, kind: ResultKind, held: HeldTensor, numbers: Tensor, step: int) -> None:
        numbers = local_of(numbers.detach())
        for box in held.placement.boxes(numbers if held.placement.span is None else numbers.view(-1)):
            kept = box.numbers.detach().to("cpu", copy=True)
            self._recording.made.append(Made(step, kind, held.name, kept, offsets=box.offsets))

    def _handles(self, number: str, block: nn.Module, *, is_last: bool) -> Iterator[Any]:
        yield block.register_forward_hook(partial(self._gave, number))

    def _gave(self, name: str, block: nn.Module, given: Any, output: Any) -> None:
        if self._is_forward:  # not of recomputation
            self._recording.note_output(self._step, name, self._unit, output)

    def end_step(self, result: StepResult) -> None:
        """Record the loss and gradient norm of the step."""
        norm = math.nan if result.grad_norm is None else result.grad_norm.item()
        self._recording.figures.append({"loss": result.loss.item(), "grad_norm": norm})

    def note_weights(self, step: int | None = None) -> None:
        """Record the present weights, as those after this step, or after step `step`."""
        for held in self._held():
            if held.numbers is not None:
                self._note("weight", held, held.numbers, self._step if step is None else step)
