"""Training steps that run from graphs of the device: launched as a whole, where the host was too slow for one by one.

    step 1, 2      by their instructions: caches fill, kernels are chosen
    step 3         captured: nothing runs, the device notes what it is asked; then replayed
    step 4, 5, …   the batch is copied to where the captured one was ▶ replayed ▶ the host reads the norm ▶ OptStep
    replay 1, 2, 4, 8, …   the same step by its instructions too: both must have the same numbers

A graph holds a step up to its gradient's norm. What needs the host stays with it: whether the step is skipped, whether
gradients are scaled, the optimizer with its learning rates. There is a graph for each shape of a batch, and a new one
where weights have moved in memory or were frozen, or modules went from training to evaluation.

All else that the host knows is in the graph as it was when that was captured. So nothing that blocks or the loss keep
on the host may change in a step before it; and since it may change later, or between steps, replays are compared with
the instructions, ever more rarely.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quintsched.errors import MisfitError, QuintschedError, UsageError
from quintsched.plan import Plan

from ..blocks.host_values import HostValues, changed, host_values
from ..blocks.trees import flatten
from ..comm.device import DeviceGraph, graphs_of
from ..parallel.dropout import KeyedDropout
from ..parallel.expert.moe import mixtures
from ..stage.batches.microbatches import Batch
from ..stage.rank_model import RankModel
from ..state.training_state import TrainingState
from ..steps.units import Latest
from .clock import Clock
from .interpreter import PreparedStep

_logger = logging.getLogger(__name__)

WARM_UP = 2
"""So many steps of a shape run by their instructions before one is captured."""

MOST_GRAPHS = 8
"""So many shapes are remembered."""

REPEATS, LIKE = 3, 4.0
"""So often a step is repeated whose graph had other numbers; these may be so many times as far off as repetitions."""

AT_HOST = "hold it in a tensor of the device that is changed in place, or run without cuda_graph"


DRAWS = (
    "cuda_graph: blocks draw random numbers (dropout, noise) by the number of the step, which a graph would keep; let "
    "them draw none (a rate of 0), or run without cuda_graph"
)


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
        if any(isinstance(module, KeyedDropout) and module.p > 0 for module in stage.modules()):
            raise UsageError(DRAWS)
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
        self._functions = functions
        self._modules = [module for stage in model.stages.values() for module in stage.modules()]
        self._shapes = Latest[_Shape](MOST_GRAPHS)

    def run(self, step: PreparedStep, number: int) -> None:
        """Run a whole step, the `number`-th of the training.

        Raises `UsageError` where it cannot be captured, or where its graph no longer does what its instructions do.
        """
        key, given = _taken_apart(step.batch)
        if key is None:
            step.interpreter.run(step.batch, -1)
            return
        shape = self._shapes.get((id(step.interpreter), id(step.units), key), lambda: _Shape(step))
        held = self._held()
        if shape.graph is not None and shape.graph.held != held:
            _logger.info("step %d: weights or modes have changed; the step is captured again", number)
            shape.graph, shape.seen = None, 0
        if shape.seen < WARM_UP:
            shape.seen += 1
            self._warm_up(step, number, is_last=shape.seen == WARM_UP)
            return
        if shape.graph is None:
            if any(forward.draws.have_drawn for forward in step.interpreter.state.compute.forwards.values()):
                raise UsageError(DRAWS)
            shape.graph = StepGraph(step, self._model, self._state, self._clock, self._new_graph(), held, number)
        shape.graph.run(step, given, number)

    def _warm_up(self, step: PreparedStep, number: int, *, is_last: bool) -> None:
        """Run a step by its instructions; by the last of them, nothing on the host may be changed any more."""
        before = self._host_values() if is_last else {}
        step.interpreter.run(step.batch, -1)
        if is_last and (moved := changed(before, self._host_values())):
            more = f", and {len(moved) - 1} more" if len(moved) > 1 else ""
            raise UsageError(
                f"cuda_graph: step {number} has changed what {moved[0]}{more} keeps on the host (a number, a list, "
                f"where a generator is); a graph would let that stand still: {AT_HOST}"
            )

    def _host_values(self) -> HostValues:
        blocks = {
            f"block {number}": block for stage in self._model.stages.values() for number, block in stage.blocks.items()
        }
        return host_values(blocks, self._functions)

    def _held(self) -> Hashable:
        """Return what a graph relies on: where weights and buffers are, which are trained, and modes of modules."""
        modules = self._modules
        parameters = [p for module in modules for p in module._parameters.values() if p is not None]
        buffers = [b for module in modules for b in module._buffers.values() if b is not None]
        return (
            tuple([tensor.data_ptr() for tensor in (*parameters, *buffers)]),
            tuple([parameter.requires_grad for parameter in parameters]),
            tuple([module.training for module in modules]),
        )


@dataclass(eq=False)
class _Shape:
    """Steps of one shape; `step` keeps alive what they are told apart by."""

    step: PreparedStep
    seen: int = 0
    graph: StepGraph | None = None


class StepGraph:
    """A step captured from the batch that it is given; raises `UsageError` where it cannot be.

    Attributes:
        held: what it relies on beside the batch.
    """

    def __init__(
        self,
        step: PreparedStep,
        model: RankModel,
        state: TrainingState,
        clock: Clock,
        graph: DeviceGraph,
        held: Hashable,
        number: int,
    ) -> None:
        self.held = held
        self._interpreter, self._model, self._gradients = step.interpreter, model, state.gradients
        self._clock, self._graph, self._replays = clock, graph, 0
        self._buffers = [buffer for stage in model.stages.values() for buffer in stage.buffers()]
        static, self._inputs = _copied(step.batch)
        try:
            with clock.off(), graph.capturing():
                self._figures = self._interpreter.lead(static)
        except (RuntimeError, QuintschedError) as error:
            raise UsageError(
                f"cuda_graph: step {number} cannot be captured: {_first_line(error)}. A block, the loss or a metric "
                "asks the device for a number (.item(), .tolist(), a mask as an index), or copies from the host in "
                "every step; leave that out, or run without cuda_graph"
            ) from error
        self._table = self._interpreter.state.compute.tally.figures.table
        self._begin_again()
        _logger.info("step %d is captured; steps of its shape run from its graph", number)

    def run(self, step: PreparedStep, given: Sequence[Tensor], number: int) -> None:
        """Run the step on such tensors, instead of those that it was captured with."""
        self._replays += 1
        if self._inputs:
            torch._foreach_copy_(self._inputs, list(given))
        is_compared = self._replays & (self._replays - 1) == 0
        before = [buffer.detach().clone() for buffer in self._buffers] if is_compared else []
        self._interpreter.announce()
        self._clock.start()
        self._graph.replay()
        self._clock.stop()
        figures, table = self._figures.clone(), self._table.clone()
        if is_compared:
            found = [tensor.clone() for tensor in self._gradients.reducer.sums()], figures, table
            figures = self._by_instructions(step.batch, before)
            self._require_same(_Numbers(*found), step.batch, figures, before, number)
        else:
            self._take_over(figures, table)
        self._interpreter.conclude(figures)

    def _take_over(self, figures: Tensor, table: Tensor) -> None:
        """Let the host be where it would be, had it led through the step."""
        gradients, tally = self._gradients, self._interpreter.state.compute.tally
        self._interpreter.state.step_end.outcome.empty = False
        gradients.accumulate(on=False)
        gradients.reducer.give()
        gradients.absent.forget()
        tally.replay(table)
        figures[2:3] = table[-2:-1]  # a stop that is asked for now

    def _begin_again(self) -> None:
        """Forget a step that was not ended."""
        self._interpreter.state.end()
        self._gradients.reducer.clear(list(self._model.stages), afresh=False)

    def _by_instructions(self, batch: Batch, before: Sequence[Tensor]) -> Tensor:
        """Run the step up to its norm, from buffers as they were; return its figures."""
        with torch.no_grad():
            for buffer, numbers in zip(self._buffers, before, strict=True):
                buffer.copy_(numbers)
        return self._interpreter.lead(batch)

    def _require_same(
        self, found: _Numbers, batch: Batch, figures: Tensor, before: Sequence[Tensor], number: int
    ) -> None:
        """Raise `UsageError` where a replay has other numbers than the instructions, which have just run.

        Some kernels add up in any order: where the instructions have other numbers each time, so may the graph.
        """
        expected = self._numbers(figures)
        apart, among_themselves = found.apart_from(expected), 0.0
        if not apart:
            return
        for _ in range(REPEATS):
            self._begin_again()
            again = self._numbers(self._by_instructions(batch, before))
            among_themselves = max(among_themselves, again.apart_from(expected))
        least, most = _rounding(expected.sums)
        if apart > min(max(LIKE * among_themselves, least), most):
            raise UsageError(
                f"cuda_graph: step {number}, run from its graph, is not what its instructions do: numbers differ by "
                f"{apart:.1g} of their norm. Something that a block or the loss works with changes on the host from "
                f"step to step (a number, a list, a schedule, a random draw), and has stood still since step "
                f"{number - self._replays // 2} at the earliest; {AT_HOST}"
            )

    def _numbers(self, figures: Tensor) -> _Numbers:
        """Return a copy of what a step up to its norm has led to."""
        table = self._interpreter.state.compute.tally.figures.table
        sums = [tensor.clone() for tensor in self._gradients.reducer.sums()]
        return _Numbers(sums, figures.clone(), table.clone())


@dataclass(frozen=True, eq=False)
class _Numbers:
    """Gradients by buckets, the figures of the norm, and those of loss and metrics."""

    sums: list[Tensor]
    figures: Tensor
    table: Tensor

    def apart_from(self, other: _Numbers) -> float:
        """Return the largest distance of any of these tensors, as a share of the other's norm."""
        # Neither a stop that was asked for, nor marks of data: these are the host's.
        mine, theirs = (self.figures[:2], self.table[:-2]), (other.figures[:2], other.table[:-2])
        beside = (*zip(self.sums, other.sums, strict=True), *zip(mine, theirs, strict=True))
        return max(_share(found, expected) for found, expected in beside)


def _share(found: Tensor, expected: Tensor) -> float:
    """Return the distance as a share of the norm; what is not finite has to be so in both."""
    if torch.equal(found, expected):
        return 0.0
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return math.inf
    found, expected = found.nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0)
    norm, distance = torch.linalg.vector_norm(expected).item(), torch.linalg.vector_norm(found - expected).item()
    return distance / norm if norm else math.inf if distance else 0.0


def _rounding(sums: Sequence[Tensor]) -> tuple[float, float]:
    """Return by how much numbers may always differ, and may differ at most, that are added up in another order."""
    eps = max((torch.finfo(tensor.dtype).eps for tensor in sums), default=0.0)
    return 16 * eps, eps**0.5


def _taken_apart(batch: Batch) -> tuple[Hashable | None, list[Tensor]]:
    """Return what tells batches of different shapes apart, and the tensors of one; None where nobody can tell."""
    trees, tensors = [batch.input_tree], [tensor for unit in batch.inputs for tensor in unit]
    for given in (*batch.targets, *(extras[name] for extras in batch.extras for name in sorted(extras))):
        tree, found = flatten(given)
        trees.append(tree)
        tensors.extend(found)
    if any(tree.unknown() is not None for tree in trees):
        return None, tensors
    names = tuple(tuple(sorted(extras)) for extras in batch.extras)
    specs = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
    return (tuple(trees), names, specs, batch.microbatches), tensors


def _copied(batch: Batch) -> tuple[Batch, list[Tensor]]:
    """Return a batch in memory of its own, and its tensors, in the order of `_taken_apart`."""
    copies: list[Tensor] = []

    def copy(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        made = tuple([tensor.detach().clone() for tensor in tensors])
        copies.extend(made)
        return made

    def copy_tree(given: Any) -> Any:
        tree, tensors = flatten(given)
        return tree.build(copy(tensors))

    def copy_extras(extras: Mapping[str, Any]) -> dict[str, Any]:
        return {name: copy_tree(extras[name]) for name in sorted(extras)}

    inputs = [copy(unit) for unit in batch.inputs]
    targets = [copy_tree(given) for given in batch.targets]
    extras = [copy_extras(given) for given in batch.extras]
    return Batch(inputs, targets, extras, batch.microbatches, batch.input_tree, batch.num_samples), copies


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
