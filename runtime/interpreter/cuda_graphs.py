"""Training steps by CUDA graphs: launched as a whole, where kernel launches one by one keep the device waiting.

    step 1, 2      run by their instructions: caches fill, kernels are chosen; step 2 must not change host state
    step 3         captured: the device records launches instead of running them; then replayed
    step 4, 5, …   the batch is copied into the captured one's memory ▶ replay ▶ the host reads the norm ▶ OptStep

A graph holds a step up to its gradient norm; skipped steps, loss scales, optimizers and learning rates stay on the
host. There is a graph for each shape of a batch. A step that changes host state, or draws, is not captured; settings
that change between steps cause a new capture. Not all state that user code may read can be watched: so the first
replay and every 100th are compared with the instructions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quintsched.errors import QuintschedError, UsageError

from ..comm.device import graphs_of, settings_of_torch
from ..comm.random_generators import AllGenerators
from ..parallel.mesh_independent_dropout import KeyedDropout
from ..stage.rank_stages import RankModel
from ..step_setup.unit_samples import Latest
from ..user_objects.host_state import HostState
from ..weights_and_gradients.training_state import TrainingState
from .busy_clock import Clock
from .handler_table_and_loop import PreparedStep
from .step_losses.sum_losses_across_ranks import NUM_ASKED

_logger = logging.getLogger(__name__)

WARM_UP, COMPARED_EVERY, MOST_GRAPHS = 2, 100, 8
"""Steps of a shape before its capture; replays of a graph from one comparison to the next; most graphs kept."""


@dataclass(eq=False)
class _StepsOfShape:
    """Steps of one shape, and their graph.

    Attributes:
        step: the first of them; kept alive, as the ids of its interpreter and units are the shape's key.
        why_not: why they are not captured; "": they are, or may be.
        seen: number of them so far, since the last change of state that their graph depends on.
        changing: tensors that they change in place.
        captured: their graph, once there is one.
        host, depends_on: the state of the host, and other state, that the graph depends on.
    """

    step: PreparedStep
    why_not: str = ""
    seen: int = 0
    changing: list[Tensor] = field(default_factory=list)
    captured: CapturedStep | None = None
    host: HostState | None = None
    depends_on: dict[str, Hashable] = field(default_factory=dict)


class StepGraphs:
    """Runs the training steps of one rank, from graphs once a shape has come often enough.

    `functions` are the loss and the metrics, by name.
    """

    def __init__(
        self, model: RankModel, state: TrainingState, clock: Clock, device: torch.device, functions: Mapping[str, Any]
    ) -> None:
        self._new_graph = graphs_of(device)
        self._state, self._clock, self._device, self._functions = state, clock, device, functions
        self._look = model.late_state.look
        self._blocks = {f"block {key}": block for s in model.stages.values() for key, block in s.blocks.items()}
        self._modules = [module for stage in model.stages.values() for module in stage.modules()]
        self._shapes = Latest[_StepsOfShape](MOST_GRAPHS)

    def run_step(self, step: PreparedStep, number: int, watch: Callable[[], None]) -> None:
        """Run a whole step, the `number`-th of the training; `watch` is called before one that runs by instructions.

        Raises `UsageError` where it cannot be captured, or where its graph no longer gives what its instructions give.
        """
        specs, given = step.batch.structure(), step.batch.tensors()
        why_not = "" if specs is not None else "an extra, or a target, is an object of an unknown type"
        shape = self._shapes.get((id(step.interpreter), id(step.units), specs), lambda: _StepsOfShape(step))
        if shape.captured and (changed := self._changed(shape)):
            _logger.info("step %d: %s changed; the step is captured again", number, changed)
            shape.captured, shape.seen = None, 0
        shape.seen += 1
        if shape.why_not or shape.seen < WARM_UP:
            watch()
            step.interpreter.run_program(step.batch, -1)
        elif shape.seen == WARM_UP:
            watch()
            why_not = self._warm_up(step, given, shape.changing)
        else:
            shape.captured = shape.captured or self._capture(step, number, shape)
            why_not = shape.captured.replay_step(given, number)
        if why_not and not shape.why_not:
            _logger.warning("cuda_graph: a step runs by its instructions: %s", why_not)
            shape.why_not, shape.captured = why_not, None

    def _warm_up(self, step: PreparedStep, given: Sequence[Tensor], changing: list[Tensor]) -> str:
        """Run a step by its instructions; return why it cannot be captured; list changed tensors in `changing`."""
        try:
            host, generators = HostState(self._blocks, self._functions), AllGenerators(self._device)
        except Exception as error:  # raised by user objects when they are inspected
            step.interpreter.run_program(step.batch, -1)
            return f"state on the host cannot be inspected: {type(error).__name__}: {error}"
        parameters, _ = self._weights()
        versions = [tensor._version for tensor in (*parameters, *given)]
        figures = step.interpreter.run_until_norm(step.batch)
        moved = [t for t, was in zip((*parameters, *given), versions, strict=True) if t._version != was]
        changed, forwards = host.changed(), step.interpreter.state.compute.forwards.values()
        draws = any(map(_drops, self._modules)) or any(forward.draws.have_drawn_otherwise for forward in forwards)
        reasons = {
            f"it changes {changed} on the host, which a replay does not; keep it in a tensor, in place": changed,
            "blocks, the loss or a metric draw random numbers, which follow the number of the step": draws
            or generators.have_moved(),
            "a block changes the batch in place, which a graph would do to its own copy": any(
                tensor is one for one in moved for tensor in given
            ),
            f"state on the host has {host.unseen}, whose contents cannot be compared": host.unseen,
            "there is more state on the host than can be compared": not host.is_whole,
        }
        step.interpreter.state.step_end.settle_loss(accumulates=False)
        step.interpreter.run_after_norm(figures)
        changing[:] = {id(tensor): tensor for tensor in (*host.tensors(), *moved)}.values()
        return next((words for words, is_so in reasons.items() if is_so), "")

    def _capture(self, step: PreparedStep, number: int, shape: _StepsOfShape) -> CapturedStep:
        shape.host, shape.depends_on = HostState(self._blocks, self._functions), self._depends_on()
        assert self._new_graph is not None
        return CapturedStep(step, self._state, self._clock, self._new_graph(), shape.changing, number, self._look)

    def _changed(self, shape: _StepsOfShape) -> str | None:
        """Return the name of state that a graph depends on and that has changed since its capture; None: none has."""
        now = self._depends_on()
        other = next((words for words, was in shape.depends_on.items() if now[words] != was), None)
        return other or (None if shape.host is None else shape.host.changed())

    def _weights(self) -> tuple[list[nn.Parameter], list[Tensor]]:
        """Return this rank's weights and buffers."""
        parameters = [p for module in self._modules for p in module._parameters.values() if p is not None]
        return parameters, [b for module in self._modules for b in module._buffers.values() if b is not None]

    def _depends_on(self) -> dict[str, Hashable]:
        """Return the state that a graph depends on, besides the batch and the state of the host, by its name."""
        parameters, buffers = self._weights()
        return {
            "where weights are in memory": tuple([tensor.data_ptr() for tensor in (*parameters, *buffers)]),
            "which weights are trained, or have hooks": tuple(
                [(p.requires_grad, tuple(p._backward_hooks or ())) for p in parameters]
            ),
            "which modules train": tuple([module.training for module in self._modules]),
            "a mode of torch": settings_of_torch(self._device),
        }


class CapturedStep:
    """One step in a CUDA `graph`, captured from a batch; raises `UsageError` where it cannot be captured.

    Args:
        step: the step, whose batch is copied.
        state: weights, gradients and optimizers.
        clock: adds up compute time.
        graph: records what is launched in its `capturing` context, and can `replay` it.
        changing: tensors that the step changes in place.
        number: number of the step, for messages.
        look: finds the weights that forwards have written to; called before an optimizer writes to weights.
    """

    def __init__(
        self,
        step: PreparedStep,
        state: TrainingState,
        clock: Clock,
        graph: Any,
        changing: list[Tensor],
        number: int,
        look: Callable[[], None],
    ) -> None:
        self._interpreter, self._tally = step.interpreter, step.interpreter.state.compute.tally
        self._gradients, self._reducer = state.gradients, state.gradients.reducer
        self._clock, self._graph, self._changing = clock, graph, changing
        self._replays, self._batch, self._look = 0, step.batch.copy(), look
        self._inputs = self._batch.tensors()
        try:
            with clock.off(), self._tally.polls_disabled(), graph.capturing():
                self._figures = self._interpreter.run_until_norm(self._batch)
        except (RuntimeError, QuintschedError) as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            advice = (
                "Where a block, the loss or a metric asks the device for a number (.item(), .tolist(), a mask as an "
                "index) or copies from the host in every step, leave that out; or run without cuda_graph"
            )
            raise UsageError(f"cuda_graph: step {number} cannot be captured: {why}. {advice}") from error
        self._table = self._tally.figures.table.tensor
        self._discard_step()
        _logger.info("step %d is captured; steps of its shape run from its graph", number)

    def replay_step(self, given: Sequence[Tensor], number: int) -> str:
        """Replay the step on these tensors, copied into those of the capture, and end it by its instructions.

        Return why the graph is not to be used again; "": it agrees with the instructions, or was not compared. Only a
        first replay may disagree. Raises `UsageError` where a later one does: steps between may have been wrong.
        """
        is_compared = self._replays % COMPARED_EVERY == 0
        if self._inputs:
            torch._foreach_copy_(self._inputs, list(given))
        before = [tensor.detach().clone() for tensor in self._changing] if is_compared else []
        self._interpreter.announce()
        self._clock.note(self._clock.now())
        self._graph.replay()
        self._clock.note(self._clock.now())
        figures, table, is_right = self._figures.clone(), self._table.clone(), True
        if is_compared:
            figures, is_right = self._compare(self._numbers(figures, table), before, given)
        else:  # set the host state that the instructions would have set
            self._reducer.accumulates = False
            self._reducer.give()
            self._gradients.absent.forget()
            self._tally.set_figures(table)
        if not is_right and self._replays:
            raise UsageError(
                f"cuda_graph: step {number}, run from its graph, differs from the same step by its instructions. State "
                "that a block or the loss depends on has changed where it is not compared; the weights of the last "
                f"{COMPARED_EVERY} steps of this shape may be wrong. Go back to a checkpoint, without cuda_graph"
            )
        self._replays += 1
        self._tally.note_stop()
        figures[2:3] = self._tally.figures.read_sums().rest[NUM_ASKED]
        self._look()
        self._interpreter.run_after_norm(figures)
        return "" if is_right else "its graph gives other numbers"

    def _compare(self, found: list[Tensor], before: list[Tensor], given: Sequence[Tensor]) -> tuple[Tensor, bool]:
        """Run a replayed step by its instructions too; return their figures, and whether the graph gave the same.

        Some kernels are not deterministic. So where they differ, the instructions run again, and the graph may differ
        from them as far as they differ from run to run.
        """
        figures = self._by_instructions(before, given)
        expected = self._numbers(figures, self._tally.figures.table.tensor)
        if all(map(torch.equal, found, expected)):
            return figures, True
        self._discard_step()
        figures = self._by_instructions(before, given)
        again = self._numbers(figures, self._tally.figures.table.tensor)
        return figures, all(map(_is_like, found, expected, again))

    def _by_instructions(self, before: list[Tensor], given: Sequence[Tensor]) -> Tensor:
        """Run the step up to its norm, from restored tensors; return its figures."""
        with torch.no_grad():
            for tensor, numbers in zip((*self._changing, *self._inputs), (*before, *given), strict=True):
                tensor.copy_(numbers)
        with self._tally.polls_disabled():
            return self._interpreter.run_until_norm(self._batch)

    def _numbers(self, figures: Tensor, table: Tensor) -> list[Tensor]:
        """Return the results of a step up to its norm, but for the host's: stop requests, counts, data digests."""
        return [tensor.clone() for tensor in (*self._reducer.sums(), *self._changing, figures[:2], table[:-2])]

    def _discard_step(self) -> None:
        """Discard a step that was not ended."""
        self._interpreter.state.end_step()
        self._reducer.clear_all()


def _is_like(found: Tensor, expected: Tensor, again: Tensor) -> bool:
    """Whether differences from the expected numbers are small, and at most a few times their run-to-run variation."""
    if torch.equal(found, expected):
        return True
    most = torch.finfo(expected.dtype).eps ** 0.5 if expected.is_floating_point() else 0.0
    found, expected, again = (numbers.double().nan_to_num() for numbers in (found, expected, again))
    apart, noise = (float((numbers - expected).norm()) for numbers in (found, again))
    return apart <= min(8 * noise, most * float(expected.norm()))


def _drops(module: nn.Module) -> bool:
    return isinstance(module, KeyedDropout) and module.p > 0 and module.training
