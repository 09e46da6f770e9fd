"""Checks of an engine's steps from outside: comparison with one process, recording, bytes saved for backward.

The reference for a step of an engine is the same step of the whole model, in a plain loop:

for each microbatch:  loss, weight = loss_fn(model(inputs, **extras), targets);  loss.backward()
gradients / total weight, clipped     ──▶ the same names as the engine's ──▶ `compare_with_one_process`
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from quintsched.errors import MisfitError, QuintschedError, counted, nearest
from quintsched.plan import Plan

from ..blocks.shape_inference import trace_shapes
from ..blocks.trees import map_tensors, tensors_of
from ..comm import Group
from ..comm.host_collectives import first_said, share_texts
from ..interpreter.bind_and_run_plans import PlanRunner
from ..interpreter.handler_table_and_loop import PreparedStep
from ..interpreter.instruction_state import LossFn
from ..interpreter.saved_activation_bytes import SavedBytes
from ..interpreter.step_losses.sum_losses_across_ranks import StepResult
from ..saving.rank_tensor_inventory import RankTensors
from ..stage.rank_stages import RankModel
from ..weights_and_gradients.master_weights import Masters
from .block_facts import ModelFacts, find_facts
from .compare_with_one_process import Comparison, compare, from_words, joined, to_words
from .record_steps import BEFORE, Made, ResultKind, StepObserver, StepRecording

MOST_TOLD = 50
"""Differences of each rank that `verify` returns at most."""


@dataclass(frozen=True)
class EngineChecks:
    """Runs steps of an engine under observation; `settle` splits a batch, and agrees with other ranks on its units."""

    settle: Callable[[Plan, Any, Any, Mapping[str, Any]], PreparedStep]
    runner: PlanRunner
    model: RankModel
    masters: Masters
    rank: RankTensors
    world: Group
    loss_fn: LossFn
    clip: float | None

    def step_counting_saved(self, inputs: Any, targets: Any, **extras: Any) -> tuple[StepResult, SavedBytes]:
        """Run a `step`, and count the bytes that autograd saves for backward, by storage, weights not included."""
        step = self.settle(self.model.plan, inputs, targets, extras)
        with SavedBytes(step.interpreter.state, self.model.stages, step.batch) as counted:
            result = self.runner.run_step(step, step.interpreter.wrapped_by(counted))
        return result, counted

    def forward_flops(self) -> float | None:
        """Return the FLOPs of one sample's forward through the whole model, as torch counts them on the meta device.

        They are those of the latest training step's shapes. None before a step, and where blocks need data.
        """
        interpreter = self.runner.interpreters.get("train")
        if interpreter is None:
            return None
        spec, model = interpreter.state.compute.shape.spec, self.model
        try:
            with FlopCounterMode(display=False) as counter:
                trace_shapes(model.outlines, spec.inputs, dict(spec.extras), model.options.dtype)
        except (QuintschedError, RuntimeError, TypeError, NotImplementedError):
            return None
        shards = model.plan.mesh.axis_size("cp") * model.plan.schedule.slices
        total: int = counter.get_total_flops()
        return total * shards / max(spec.num_samples, 1)

    def record_step(self, recording: StepRecording, inputs: Any, targets: Any, **extras: Any) -> StepResult:
        """Run a `step`, and record all tensors that it computes on this rank; see `record_steps`."""
        observer = self._observer(recording)
        if not recording.figures:
            observer.note_weights(BEFORE)
        result = self._run_observed(observer, inputs, targets, extras)
        observer.note_weights()
        return result

    def inspect(self, inputs: Any, targets: Any, **extras: Any) -> ModelFacts:
        """Run a `step`, and return the facts it has found about blocks and losses, with consequences (collective)."""
        blocks = {int(n): block for stage in self.model.stages.values() for n, block in stage.blocks.items()}
        before = {n: {name: b.clone() for name, b in block.named_buffers()} for n, block in blocks.items()}
        step = self.settle(self.model.plan, inputs, targets, extras)
        self.runner.run_step(step)
        changed = {
            n: [name for name, b in block.named_buffers() if name in before[n] and not torch.equal(b, before[n][name])]
            for n, block in blocks.items()
        }
        return find_facts(step, changed, self.model, self.runner.losses, self.world)

    def verify(self, reference: nn.Module, inputs: Any, targets: Any, **extras: Any) -> Comparison:
        """Run a `step`, and compare it with the same step of a whole model in one process (collective).

        Compared are the weights before the step, outputs of blocks (where `reference` is an `nn.Sequential` of the
        blocks), gradients, loss and norm, each within rounding error, found by running the reference in float64.

        Args:
            reference: the model in one piece, with the engine's weights; without dropout.
            inputs, targets, extras: as for `step`, but of the whole batch, and on every rank.

        Returns:
            The differences, the same on every rank: the first cause first, at most `MOST_TOLD` of each rank.

        Raises:
            MisfitError: weights that the reference lacks, a reference that draws, a batch that does not divide.
        """
        plan = self.model.plan
        whole = WholeModel(
            reference,
            self.rank.names.own_of(self.model.stages),
            self.loss_fn,
            self.clip,
            self.model.num_replicas * plan.schedule.microbatches,
        )
        refusal = first_said(whole.refusal(), self.world)
        if refusal:
            raise MisfitError(refusal)
        alone, precise = (whole.record_step(inputs, targets, extras, dtype) for dtype in (None, torch.float64))
        recording = StepRecording(self.world.index, plan.mesh.coordinates(self.world.index))
        observer = self._observer(recording)
        observer.note_weights(BEFORE)
        given = [share_of(tree, self.model.replica, self.model.num_replicas) for tree in (inputs, targets, extras)]
        self._run_observed(observer, *given)
        names = [type(outline).__name__ for outline in self.model.outlines]
        mine = compare([recording], alone, precise, plan, names)
        return joined(list(map(from_words, share_texts(self.world, to_words(mine, MOST_TOLD)))))

    def _observer(self, recording: StepRecording) -> StepObserver:
        return StepObserver(self.model.plan, self.model, self.masters, self.rank.held, recording=recording)

    def _run_observed(self, observer: StepObserver, inputs: Any, targets: Any, extras: Mapping[str, Any]) -> StepResult:
        step = self.settle(self.model.plan, inputs, targets, extras)
        with observer.watching():
            result = self.runner.run_step(step, step.interpreter.wrapped_by(observer))
        observer.end_step(result)
        return result


@dataclass(frozen=True)
class WholeModel:
    """Reference model in one process that an engine is compared with.

    Args:
        model: in the same state as the engine's; it is copied.
        names: names of weights in the engine → names in the model.
        loss_fn, clip: as the engine's.
        microbatches: number of parts of a whole batch: the microbatches of all replicas.
    """

    model: nn.Module
    names: Mapping[str, str]
    loss_fn: Callable[[Any, Any], Any]
    clip: float | None
    microbatches: int

    def refusal(self) -> str:
        """Return the reason why the model cannot be compared: it draws, or lacks weights of the engine; "": it can."""
        for name, module in self.model.named_modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 and module.training:
                return (
                    f"the reference draws by itself in {name!r}, and would draw something else than the engine; set "
                    "the probabilities of its dropouts, and of those of the engine's blocks, to 0"
                )
        known = dict(self.model.named_parameters(remove_duplicate=False))
        for ours, own in self.names.items():
            if own not in known:
                return (
                    f"the reference has no weight {own!r}, which is {ours!r} in the engine{nearest(own, list(known))}"
                )
        return ""

    def record_step(
        self, inputs: Any, targets: Any, extras: Mapping[str, Any], dtype: torch.dtype | None
    ) -> StepRecording:
        """Return the recording of a step on a whole batch, computed in `dtype` (None: the model's own)."""
        model = copy.deepcopy(self.model).train(self.model.training)
        if dtype is not None:
            model, inputs, extras = model.to(dtype), _cast(inputs, dtype), _cast(dict(extras), dtype)
        model.zero_grad()
        recording = StepRecording(0, {})
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._note("weight", BEFORE, parameters, recording, lambda p: p.detach())
        total, weights = 0.0, 0.0
        cut = [self._cut(tree) for tree in (inputs, targets, dict(extras))]
        for unit, (given, wanted, beside) in enumerate(zip(*cut, strict=True)):
            with _watching(model, recording, unit):
                output = model(given, **beside)
            loss, weight = self._weighed(output, wanted)
            loss.backward()
            total, weights = total + loss.item(), weights + weight
        norm = self._finish(model, weights)
        self._note("gradient", 0, parameters, recording, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)
        recording.figures.append({"loss": total / weights, "grad_norm": norm})
        return recording

    def _cut(self, tree: Any) -> list[Any]:
        rows = next((tensor.shape[0] for tensor in tensors_of(tree)), 0)
        if rows % self.microbatches:
            raise MisfitError(
                f"a batch of {counted(rows, 'sample')} does not divide into {counted(self.microbatches, 'microbatch')}"
            )
        return [share_of(tree, number, self.microbatches) for number in range(self.microbatches)]

    def _weighed(self, output: Any, targets: Any) -> tuple[Tensor, float]:
        found = self.loss_fn(output, targets)
        if isinstance(found, tuple):
            return found[0], float(found[1])
        return found, 1.0

    def _finish(self, model: nn.Module, weight: float) -> float:
        """Divide accumulated gradients by the total weight, clip them, and return their norm before clipping."""
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(weight)
        return nn.utils.clip_grad_norm_(model.parameters(), inf if self.clip is None else self.clip).item()

    def _note(
        self,
        kind: ResultKind,
        step: int,
        parameters: Mapping[str, nn.Parameter],
        recording: StepRecording,
        of: Callable[[nn.Parameter], Tensor],
    ) -> None:
        for ours, own in self.names.items():
            tensor = of(parameters[own]).detach().clone()
            recording.made.append(Made(step, kind, ours, tensor, offsets=(0,) * tensor.dim()))


def share_of(tree: Any, part: int, parts: int) -> Any:
    """Return one of `parts` equal parts of a batch along samples: that of a replica or microbatch."""

    def share(tensor: Tensor) -> Tensor:
        size = tensor.shape[0] // parts
        return tensor[part * size : (part + 1) * size]

    return map_tensors(share, tree)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)


@contextmanager
def _watching(model: nn.Module, recording: StepRecording, unit: int) -> Iterator[None]:
    """Context that records the outputs of a sequential model's blocks; blocks of other models are unknown."""
    children = model.named_children() if isinstance(model, nn.Sequential) else ()
    with ExitStack() as stack:
        for name, block in children:
            note = partial(recording.note_output, 0, name, unit)
            stack.callback(block.register_forward_hook(lambda block, given, output, note=note: note(output)).remove)
        yield
