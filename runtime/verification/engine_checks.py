"""What looks at an engine's steps from outside: comparisons with one process, recordings, bytes that are saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quintsched.errors import MisfitError
from quintsched.plan import Plan

from ..comm import Group
from ..comm.control import first_said, share_texts
from ..interpreter.activation_memory import SavedBytes
from ..interpreter.interpreter import PreparedStep
from ..interpreter.plan_runner import PlanRunner
from ..interpreter.rank_state import LossFn
from ..interpreter.tally import StepResult
from ..saving.rank_tensors import RankTensors
from ..stage.rank_model import RankModel
from ..state.master_weights import Masters
from .block_facts import ModelFacts, find_facts
from .comparison import Comparison, compare, from_words, joined, to_words
from .recording import BEFORE, Recording, StepObserver
from .whole_model import WholeModel, share_of

MOST_TOLD = 50
"""How many differences of each rank `verify` gives."""


@dataclass(frozen=True)
class EngineChecks:
    """Does steps of an engine and looks at them; `settle` cuts a batch, and settles with other ranks what is run."""

    settle: Callable[[Plan, Any, Any, Mapping[str, Any]], PreparedStep]
    runner: PlanRunner
    model: RankModel
    masters: Masters
    rank: RankTensors
    world: Group
    loss_fn: LossFn
    clip: float | None

    def step_counting_saved(self, inputs: Any, targets: Any, **extras: Any) -> tuple[StepResult, SavedBytes]:
        """Do a `step`, and count the bytes that autograd saves for backwards: by storage, weights not included."""
        step = self.settle(self.model.plan, inputs, targets, extras)
        with SavedBytes(step.interpreter.state, self.model.stages, step.batch) as counted:
            result = self.runner.run(step, step.interpreter.watched(counted))
        return result, counted

    def record_step(self, recording: Recording, inputs: Any, targets: Any, **extras: Any) -> StepResult:
        """Do a `step`, and write down all that it makes on this rank; see `verification`."""
        observer = self._observer(recording)
        result = self._run_observed(observer, inputs, targets, extras)
        observer.note_weights()
        return result

    def inspect(self, inputs: Any, targets: Any, **extras: Any) -> ModelFacts:
        """Do a `step`, and return what it has found of blocks and losses, and what follows (collective)."""
        blocks = {int(n): block for stage in self.model.stages.values() for n, block in stage.blocks.items()}
        before = {n: {name: b.clone() for name, b in block.named_buffers()} for n, block in blocks.items()}
        step = self.settle(self.model.plan, inputs, targets, extras)
        self.runner.run(step)
        changed = {
            n: [name for name, b in block.named_buffers() if name in before[n] and not torch.equal(b, before[n][name])]
            for n, block in blocks.items()
        }
        return find_facts(step, changed, self.model, self.runner.losses, self.world)

    def verify(self, reference: nn.Module, inputs: Any, targets: Any, **extras: Any) -> Comparison:
        """Do a `step`, and compare it with the same step of a whole model in one process (collective).

        Compared are the weights before the step, outputs of blocks (where `reference` is an `nn.Sequential` of the
        blocks), gradients, loss and norm, each within what rounding does, found by running the reference in float64.

        Args:
            reference: the model in one piece, with the weights that the engine has; without dropout.
            inputs, targets, extras: as for `step`, but of the whole batch, and on every rank.

        Returns:
            What differs, on every rank the same: the first cause first, at most `MOST_TOLD` of each rank.

        Raises:
            MisfitError: weights that the reference does not have, a reference that draws, a batch that does not divide.
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
        alone, precise = (whole.record(inputs, targets, extras, dtype) for dtype in (None, torch.float64))
        recording = Recording(self.world.index, plan.mesh.coordinates(self.world.index))
        observer = self._observer(recording)
        observer.note_weights(BEFORE)
        given = [share_of(tree, self.model.replica, self.model.num_replicas) for tree in (inputs, targets, extras)]
        self._run_observed(observer, *given)
        names = [type(outline).__name__ for outline in self.model.outlines]
        mine = compare([recording], alone, precise, plan, names)
        return joined(list(map(from_words, share_texts(self.world, to_words(mine, MOST_TOLD)))))

    def _observer(self, recording: Recording) -> StepObserver:
        return StepObserver(self.model.plan, self.model, self.masters, self.rank.held, recording=recording)

    def _run_observed(self, observer: StepObserver, inputs: Any, targets: Any, extras: Mapping[str, Any]) -> StepResult:
        step = self.settle(self.model.plan, inputs, targets, extras)
        with observer.watching():
            result = self.runner.run(step, step.interpreter.watched(observer))
        observer.end(result)
        return result
