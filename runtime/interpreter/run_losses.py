"""The loss and the metrics of a run, and when ranks agree on what these are over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quintsched.errors import UsageError
from quintsched.plan import Plan

from ..parallel.mesh_groups import MeshGroups
from ..stage.losses import cuts_sequences
from ..stage.mean_losses import WeighedLoss, WeighedMetric
from ..stage.rank_model import RankModel
from .rank_state import RunOptions
from .tally import Figures


class RunLosses:
    """What a run makes of outputs and targets.

    Attributes:
        loss, metrics: the user's, weighed.
        earlier: figures of batches whose gradients wait for those of others.
    """

    def __init__(self, model: RankModel, groups: MeshGroups, device: torch.device, options: RunOptions) -> None:
        self._model, self._groups, self._device = model, groups, device
        self.loss = WeighedLoss(
            options.loss_fn,
            options.loss_over,
            is_cut=cuts_sequences(model.plan),
            is_captured=options.cuda_graph,
        )
        self.metrics = {name: WeighedMetric(name, metric) for name, metric in options.metrics.items()}
        self.earlier: list[Figures] = []
        self._num_shares = model.num_replicas * model.plan.mesh.axis_size("cp")
        self._asked_in_vain = False

    def begin(self, plan: Plan, targets: Sequence[Any], number: int | None, *, last: bool) -> None:
        """Begin the `number`-th step, or an evaluation; let a loss that is a sum of means know its batch (collective).

        A step that may run from a graph, where no loss function is called, has no number. `targets` are those of each
        unit, as far as the rank has them. Raises `UsageError` for one of several batches.
        """
        self.loss.begin_step(number if plan.mode == "train" else None, plan.schedule.num_units, self._num_shares)
        if self.loss.means is None:
            return
        if not last or self.earlier:
            raise UsageError(
                "a SumOfMeans is weighed by all that a step is over; give its batch in one step, without last=False"
            )
        holds_all = self._model.pp_rank == plan.layout.rank_of(plan.routes[0].stages[-1])
        is_alone = self._num_shares == 1 and len(plan.routes) == 1
        given = [some for some in targets if some is not None] if holds_all else []
        self.loss.begin(given, self._device, None if is_alone else self._groups.metrics)

    def is_doubted(self) -> bool:
        """Whether what the loss of this rank goes by has changed since ranks agreed on what it is over."""
        return self.loss.is_changed

    def settle(self, plan: Plan, *, accumulates: bool, again: bool = False) -> None:
        """Have all ranks agree on what the loss is over, before weights change; see `WeighedLoss.settle`."""
        loss = self.loss
        if loss.is_settled and not (loss.is_due or again):
            if loss.is_changed:
                return  # all ranks hear of it with the figures of the step
            if not loss.refusal:
                loss.end_step()
                return
        of_metrics = next((metric.refusal for metric in self.metrics.values() if metric.refusal), "")
        is_alone = plan.schedule.num_units * self._num_shares == 1 and not accumulates and not self.earlier
        loss.settle(self._groups.world, matters=not is_alone, of_metrics=of_metrics, again=again)
        loss.end_step()
        self._asked_in_vain = not loss.is_settled

    def settle_evaluation(self, plan: Plan, *, wants_outputs: bool) -> None:
        """Have them agree after an evaluation; one that only wants outputs may find no loss, ever again."""
        if not (wants_outputs and self._asked_in_vain):
            self.settle(plan, accumulates=False)
