"""Whether what a stage is given requires a gradient, as it does in one process, and gets one.

stages before all frozen      x has requires_grad=False, as there: code may ask, reentrant checkpoints go by it
a stage that detaches x       no gradient comes back in the whole step: refused, since those before would be stepped
                              with zeros, which decay and momenta apply, and in one process not at all
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import nn

from quintsched.errors import MisfitError

from ..blocks.shapes import requires_gradients
from ..blocks.trees import TreeSpec


class Given(Protocol):
    """What a unit is given, as all ranks of its pipeline know it."""

    @property
    def inputs(self) -> TreeSpec:
        """Its inputs."""

    @property
    def extras(self) -> tuple[tuple[str, TreeSpec], ...]:
        """Its extras, by name."""


class _Watched(NamedTuple):
    """The first parameter before a stage that is trained, and those before it, which are `frozen`."""

    parameters: Sequence[ref[nn.Parameter]]
    frozen: int


class BoundaryGradients:
    """The stages of one rank, and what is trained before them.

    Args:
        blocks: the whole model; of what is not built yet the outlines say what is trained.
        outlines: all blocks without data.
        cuts: the blocks of each stage.
        stages: those of this rank.
        dtype: of the weights.

    Attributes:
        constant: the stages whose inputs require no gradient in this step.
        reached: those of which a backward of this step gave a gradient to its inputs.
    """

    def __init__(
        self,
        blocks: Sequence[Any],
        outlines: Sequence[nn.Module],
        cuts: Sequence[range],
        stages: Sequence[int],
        dtype: torch.dtype | None,
    ) -> None:
        self._outlines, self._dtype = outlines, dtype
        self._starts = {stage: cuts[stage].start for stage in stages if cuts[stage].start}
        whole = [block if isinstance(block, nn.Module) else outlines[number] for number, block in enumerate(blocks)]
        self._before = {
            stage: [ref(parameter) for block in whole[:start] for parameter in block.parameters()]
            for stage, start in self._starts.items()
        }
        self._watched = {stage: _Watched((), -1) for stage in self._starts}
        self._known: dict[tuple[int, TreeSpec, tuple[bool, ...]], bool] = {}
        self.constant: set[int] = set()
        self.reached: set[int] = set()

    def begin_step(self, given: Callable[[], Given | None]) -> None:
        """Find out what is frozen in a step, whose units are `given` this."""
        self.reached.clear()
        for stage, watched in self._watched.items():
            frozen = 0
            for reference in watched.parameters:
                parameter = reference()
                if parameter is None or parameter.requires_grad:
                    break
                frozen += 1
            if frozen != watched.frozen:
                self._look_through(stage, given())

    def _look_through(self, stage: int, unit: Given | None) -> None:
        """Find out which parameters before a stage are trained, and whether its inputs require gradients."""
        before = self._before[stage]
        parameters = [reference() for reference in before]
        flags = tuple(parameter is None or parameter.requires_grad for parameter in parameters)
        frozen = flags.index(True) if True in flags else len(flags)
        self._watched[stage] = _Watched(before[: frozen + 1], frozen)
        self.constant.discard(stage)
        if unit is not None and None not in parameters and not all(flags) and not self._requires(stage, unit, flags):
            self.constant.add(stage)

    def _requires(self, stage: int, unit: Given, flags: tuple[bool, ...]) -> bool:
        key = stage, unit.inputs, flags
        if key not in self._known:
            before = self._outlines[: self._starts[stage]]
            self._known[key] = requires_gradients(before, flags, unit.inputs, dict(unit.extras), self._dtype)
        return self._known[key]

    def require_reached(self, stage: int) -> None:
        """Raise `MisfitError` where no backward of a step has given the inputs of a stage a gradient."""
        if stage not in self.reached:
            start = self._starts[stage]
            raise MisfitError(
                f"blocks from {start} on give no gradient to what they are given, as after `detach()`, `argmax` or "
                "under no_grad: in one process the weights before them are not stepped then, and here they would be, "
                f"with gradients of zero; freeze blocks 0 to {start - 1} while it is so: "
                "parameter.requires_grad_(False)"
            )
