"""What looks at an engine's steps from outside: comparisons with one process, recordings, bytes that are saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quintsched.errors import MisfitError
from quintsched.plan import Plan
from quintsched.simulation.costs import Costs

from .comm import Transport
from .comm.control import first_said, gather_texts
from .interchange.exchange import Exchange
from .interpreter.activation_memory import SavedBytes
from .interpreter.interpreter import PreparedStep
from .interpreter.plan_runner import PlanRunner
from .interpreter.rank_state import LossFn
from .interpreter.tally import StepResult
from .parallel.mesh_groups import MeshGroups
from .stage.rank_model import RankModel
from .state.master_weights import Masters
from .verification.comparison import Comparison, compare, from_words, joined, to_words
from .verification.recording import BEFORE, Recording, StepObserver
from .verification.whole_model import WholeModel, share_of

MOST_TOLD = 50
"""How many differences of each rank `verify` gives."""


class EngineChecks:
    """The part of `Engine` that looks at its steps."""

    plan: Plan
    transport: Transport
    masters: Masters
    replica: int
    num_replicas: int
    _model: RankModel
    _groups: MeshGroups
    _runner: PlanRunner
    _exchange: Exchange
    _loss_fn: LossFn
    _clip: float | None

    def _settle(self, plan: Plan, inputs: Any, targets: Any, extras: Mapping[str, Any]) -> PreparedStep:
        """Cut a batch, and settle with the other ranks what its units are: see `Engine`."""
        raise NotImplementedError

    def step_counting_saved(self, inputs: Any, targets: Any, **extras: Any) -> tuple[StepResult, SavedBytes]:
        """Do a `step`, and count the bytes that autograd saves for backwards: by storage, weights not included."""
        step = self._settle(self.plan, inputs, targets, extras)
        with SavedBytes(step.interpreter.state, self._model.stages, step.batch) as counted:
            result = self._runner.run(step, step.interpreter.watched(counted))
        return result, counted

    def record_step(self, recording: Recording, inputs: Any, targets: Any, **extras: Any) -> StepResult:
        """Do a `step`, and write down all that it makes on this rank; see `verification`."""
        observer = self._observer(recording)
        result = self._run_observed(observer, inputs, targets, extras)
        observer.note_weights()
        return result

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
        spec = self.plan.schedule
        whole = WholeModel(
            reference,
            self._exchange.names.own_of(self._model.stages),
            self._loss_fn,
            self._clip,
            self.num_replicas * spec.microbatches,
        )
        refusal = first_said(whole.refusal(), self._groups.world)
        if refusal:
            raise MisfitError(refusal)
        alone, precise = (whole.record(inputs, targets, extras, dtype) for dtype in (None, torch.float64))
        recording = Recording(self.transport.rank, self.plan.mesh.coordinates(self.transport.rank))
        observer = self._observer(recording)
        observer.note_weights(BEFORE)
        given = [share_of(tree, self.replica, self.num_replicas) for tree in (inputs, targets, extras)]
        self._run_observed(observer, *given)
        names = [type(outline).__name__ for outline in self._model.outlines]
        mine = compare([recording], alone, precise, self.plan, names)
        return joined(list(map(from_words, gather_texts(self._groups.world, to_words(mine, MOST_TOLD)))))

    def _observer(self, recording: Recording) -> StepObserver:
        program, first_unit = self.plan.programs[self._model.pp_rank], self.replica * self.plan.schedule.num_units
        return StepObserver(program, first_unit, self._model.stages, self.masters, self._exchange.held, recording)

    def _run_observed(self, observer: StepObserver, inputs: Any, targets: Any, extras: Mapping[str, Any]) -> StepResult:
        step = self._settle(self.plan, inputs, targets, extras)
        with observer.watching():
            result = self._runner.run(step, step.interpreter.watched(observer))
        observer.end(result)
        return result

    def saved_costs(self, counted: SavedBytes) -> Costs:
        """Return what units of each stage hold, in bytes, as counted on all ranks (collective): for `simulate`."""
        return counted.costs(self._groups.world, self.transport.device)
