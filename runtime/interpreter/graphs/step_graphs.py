"""Training steps that run from graphs of the device: launched as a whole, where the host was too slow for one by one.

    step 1, 2      by their instructions: caches fill, kernels are chosen; the second must leave the host as it was
    step 3         captured: nothing runs, the device notes what it is asked; then replayed
    step 4, 5, …   the batch is copied to where the captured one was ▶ replayed ▶ the host reads the norm ▶ OptStep

A graph holds a step up to its gradient's norm. What needs the host stays with it: whether the step is skipped, whether
gradients are scaled, the optimizer with its learning rates. There is a graph for each shape of a batch.

All that the host knows is in the graph as it was when that was captured. What changes in every step, or draws, is never
captured: these steps run by their instructions, with a warning. What is set between steps has the step captured anew:
what code names (`objects.host_state`), where weights lie, modes. And as nobody sees all that code may ask, replays are
compared with the instructions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError, UsageError
from quintsched.plan import Plan

from ...comm.device import AllGenerators, graphs_of, settings_of_torch
from ...objects.host_state import HostState
from ...parallel.dropout import KeyedDropout
from ...parallel.expert.moe import mixtures
from ...stage.rank_model import RankModel
from ...state.training_state import TrainingState
from ...steps.units import Latest, Units
from ..clock import Clock
from ..interpreter import Interpreter, PreparedStep
from .captured_step import CapturedStep
from .static_batch import taken_apart

_logger = logging.getLogger(__name__)

WARM_UP = 2
"""So many steps of a shape run by their instructions before one is captured."""

MOST_GRAPHS = 8
"""So many shapes are remembered."""


def require_capturable(plan: Plan, device: torch.device, *, scales: bool) -> None:
    """Raise `UsageError` where a step of the plan cannot be captured, `MisfitError` where the device has no graphs.

    `scales` says whether losses are scaled, for fp16.
    """
    if obstacles := plan.capture_obstacles():
        raise UsageError(f"cuda_graph: no step of this plan can be captured: {'; '.join(obstacles)}")
    if scales:
        raise UsageError("cuda_graph: the loss scale is a number of the host, which a graph would keep; take bfloat16")
    if graphs_of(device) is None:
        raise MisfitError(f"cuda_graph wants a CUDA device, and this run is on {device.type}; leave it out there")


def _require_constant(model: RankModel) -> None:
    """Raise `UsageError` for blocks that the host leads through each step."""
    for stage in model.stages.values():
        if any(map(_drops, stage.modules())):
            raise UsageError(
                "cuda_graph: blocks draw random numbers (dropout), which follow the number of the step; let them draw "
                "none (a rate of 0), or run without cuda_graph"
            )
        for name, mixture in mixtures(stage).items():
            if mixture.waits_for_routing:
                raise UsageError(
                    f"cuda_graph: the mixture of experts {name} asks the device how many tokens go to each expert; "
                    "give each the same number: pad_to_capacity, with a capacity_factor"
                )


class StepGraphs:
    """Runs the training steps of one rank, from graphs once their shape is known.

    Args:
        model: this rank's stages; raises `UsageError` for blocks that the host leads.
        state: their weights and gradients.
        clock: adds up the time that the rank computes.
        device: which has graphs.
        functions: the loss and metrics, by names.
    """

    def __init__(
        self,
        model: RankModel,
        state: TrainingState,
        clock: Clock,
        device: torch.device,
        functions: Mapping[str, Any],
    ) -> None:
        _require_constant(model)
        new_graph = graphs_of(device)
        assert new_graph is not None
        self._model, self._state, self._clock, self._new_graph = model, state, clock, new_graph
        self._functions, self._device = functions, device
        self._modules = [module for stage in model.stages.values() for module in stage.modules()]
        self._shapes, self._num_shapes = Latest[_Shape](MOST_GRAPHS), 0

    def run(self, step: PreparedStep, number: int, watch: Callable[[], None] = lambda: None) -> None:
        """Run a whole step, the `number`-th of the training; `watch` is called before one that runs by instructions.

        Raises `UsageError` where it cannot be captured, or where its graph no longer does what its instructions do.
        """
        key, given = taken_apart(step.batch)
        shape = self._shapes.get((id(step.interpreter), id(step.units), key), lambda: self._new_shape(step, key))
        if shape.graph is not None and (changed := self._changed(shape)):
            _logger.info("step %d: %s changed; the step is captured again", number, changed)
            shape.graph, shape.seen = None, 0
        shape.seen += 1
        if shape.excuse or shape.seen < WARM_UP:
            watch()
            step.interpreter.run(step.batch, -1)
        elif shape.seen == WARM_UP:
            watch()
            shape.excuse, shape.changing = self._warm_up(step, given)
        else:
            shape.graph = shape.graph or self._capture(shape, step, number)
            shape.excuse = shape.graph.run(given, number)
        shape.tell()

    def _capture(self, shape: _Shape, step: PreparedStep, number: int) -> CapturedStep:
        shape.host, shape.held = HostState(self._blocks(), self._functions), self._held()
        graph, gradients = self._new_graph(), self._state.gradients
        return CapturedStep(step, gradients, self._clock, graph, shape.changing, number)

    def _changed(self, shape: _Shape) -> str | None:
        """Return what has changed of what a graph relies on, in words."""
        held = self._held()
        if held != shape.held:
            return next(words for words, was in shape.held.items() if held[words] != was)
        return None if shape.host is None else shape.host.changed()

    def _new_shape(self, step: PreparedStep, key: Hashable) -> _Shape:
        self._num_shapes += 1
        if self._num_shapes == MOST_GRAPHS + 1:
            _logger.warning("cuda_graph: batches have more than %d shapes; the latest have graphs", MOST_GRAPHS)
        excuse = "" if key is not None else "an extra, or a target, is an object that nothing is known of"
        return _Shape(step.interpreter, step.units, excuse)

    def _warm_up(self, step: PreparedStep, given: Sequence[Tensor]) -> tuple[str, list[Tensor]]:
        """Run a step by its instructions; return why it is not to be captured, and the tensors that it changes."""
        try:
            host, generators = HostState(self._blocks(), self._functions), AllGenerators(self._device)
        except Exception as error:  # what a user's objects do when they are looked at
            step.interpreter.run(step.batch, -1)
            return f"what the host keeps cannot be looked into: {type(error).__name__}: {error}", []
        parameters, buffers = self._weights()
        versions = [tensor._version for tensor in (*parameters, *given)]
        figures = step.interpreter.lead(step.batch)
        moved = [t for t, was in zip((*parameters, *given), versions, strict=True) if t._version != was]
        excuse, changed = "", host.changed()
        if changed is not None:
            excuse = f"it changes {changed} on the host, which would stand still; hold it in a tensor that stays"
        elif generators.have_moved() or self._draws(step):
            excuse = "blocks, the loss or a metric draw random numbers, which follow the number of the step"
        elif any(tensor is one for one in moved for tensor in given):
            excuse = "a block changes the batch in place, which a graph would do to its own copy"
        elif host.unseen is not None:
            excuse = f"the host keeps {host.unseen}, of which nobody can tell what is in it"
        elif not host.is_whole:
            excuse = "there is more on the host than can be watched"
        step.interpreter.conclude(figures)
        return excuse, list({id(tensor): tensor for tensor in (*buffers, *host.tensors(), *moved)}.values())

    def _draws(self, step: PreparedStep) -> bool:
        forwards = step.interpreter.state.compute.forwards.values()
        return any(map(_drops, self._modules)) or any(forward.draws.have_drawn_otherwise for forward in forwards)

    def _blocks(self) -> dict[str, nn.Module]:
        """Return this rank's blocks by their names."""
        stages = self._model.stages.values()
        return {f"block {number}": block for stage in stages for number, block in stage.blocks.items()}

    def _weights(self) -> tuple[list[nn.Parameter], list[Tensor]]:
        """Return this rank's weights and buffers."""
        parameters = [p for module in self._modules for p in module._parameters.values() if p is not None]
        return parameters, [b for module in self._modules for b in module._buffers.values() if b is not None]

    def _held(self) -> dict[str, Hashable]:
        """Return what a graph relies on beside the batch and what code goes by, each in words."""
        parameters, buffers = self._weights()
        return {
            "where weights are in memory": tuple([tensor.data_ptr() for tensor in (*parameters, *buffers)]),
            "which weights are trained, or have hooks": tuple(
                [(p.requires_grad, tuple(p._backward_hooks or ())) for p in parameters]
            ),
            "which modules train": tuple([module.training for module in self._modules]),
            "a mode of torch": settings_of_torch(self._device),
        }


@dataclass(eq=False)
class _Shape:
    """Steps of one shape, which an interpreter and units tell apart that are kept alive here.

    `excuse` says why they run by their instructions; `changing` are the tensors that their forwards change.
    """

    interpreter: Interpreter
    units: Units
    excuse: str = ""
    seen: int = 0
    graph: CapturedStep | None = None
    host: HostState | None = None
    held: dict[str, Hashable] = field(default_factory=dict)
    changing: list[Tensor] = field(default_factory=list)
    is_told: bool = False

    def tell(self) -> None:
        """Say, once, why there is no graph."""
        if self.excuse and not self.is_told:
            self.graph, self.is_told = None, True
            _logger.warning("cuda_graph: a step runs by its instructions: %s", self.excuse)


def _drops(module: nn.Module) -> bool:
    return isinstance(module, KeyedDropout) and module.p > 0 and module.training
