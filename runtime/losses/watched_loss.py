"""Loss, metric, or part of a loss: examined at its first call, and watched from then on.

first call    experiments: its reduction (`find_loss_reduction`, `stated_weights`, `find_metric_reduction`)
each step     before: whether the state it reads was changed from outside; after: whether its own calls did; and its
              reduction, by values of the step's own microbatches (`recheck_reduction_by_values`), as other data may
              branch otherwise
some steps    the same by gradients too (`recheck_reduction_on_batches`): 0, 1, 2, 4, 8, …; steps with unlike shapes;
              steps before which state that it reads has changed

This package's own functions are trusted; torch's are not compared by values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..blocks.trees import flatten, tensors_of
from .experiments.find_loss_reduction import WRITES, LossExamination
from .experiments.find_metric_reduction import MetricExamination, StatedMetricExamination
from .experiments.stated_weights import StatedExamination
from .loss_reductions import WITHOUT_GRADIENT, LossWeight, Over, WeightFinding
from .recheck_reduction_by_values import Late, compare_values, is_known
from .recheck_reduction_on_batches import JoinedCall, RealBatch, SampleUnit, why_rests_misfit
from .save_and_restore_loss_state import FunctionKept, FunctionState, class_weights, versions_kept

_OTHERWISE = "it was found to be {}, but in step {} it is not so: {}"
HANDED_ON = 'a block has found it, and it is handed on; say that it is a mean over samples, loss_over="samples"'
_OF_THIS_PACKAGE = __name__.split(".")[0]


class Examined:
    """Function (output, targets) → a number, or (sum, weight), with its reduction.

    Args:
        function: the user's.
        name: its name in messages.
        is_loss: whether its gradients matter.
        is_cut: whether sequences are cut.

    Attributes:
        rule: its reduction; None: not known yet.
        tables: the class weights that it holds.
        since: name of state that it reads and that was changed from outside since the last step; "": none.
        refusal: the reason why no weights of microbatches make its mean that of the batch; "": some do.
        is_blind: whether it has had no gradient so far; `was_blind`: in some microbatch since ranks agreed last.
        late: result of the comparison by values in this step; None: there was none.
        rests: output tensors of no sample that it reads (see `RealBatch.rests`).
        of_each: elements per sample, where it is a mean over samples; None: not known.
        apart: paths of output tensors that belong to no sample, whatever their rows.
    """

    def __init__(self, function: Callable[..., Any], name: str, *, is_loss: bool = True, is_cut: bool = False) -> None:
        self._function, self._name, self._is_loss, self._is_cut = function, name, is_loss, is_cut
        self.rule: LossWeight | None = None
        self.tables = class_weights(function)
        self.since = self.refusal = ""
        self.is_blind, self.was_blind, self.apart = False, False, frozenset[str]()
        self._beside: list[object] = []
        self._is_ours = _is_ours(function)
        self._kind: type[LossExamination] = LossExamination
        self._state: FunctionState | None = None
        self._begun: FunctionState | None = None
        self._first: FunctionKept | None = None
        self._harmless = set[str]()
        self._num_changes = 0
        self.of_each: float | None = None
        self.rests: dict[str, list[str]] = {}
        self.late: Late | None = None
        self._is_known, self._writes = self._is_ours or is_known(function), False
        self._way: JoinedCall | None = None
        self._old: LossWeight | None = None

    @property
    def is_believed(self) -> bool:
        """Return whether no more checks are needed: it is this package's own, with a stated reduction, or a metric."""
        is_known = self._is_ours and self.rule is not None
        return is_known and (not self._is_loss or self.rule == LossWeight(Over.STATED))

    @property
    def is_compared(self) -> bool:
        """Return whether its values are compared in each step."""
        return not self._is_known and self._way is not None and not self.refusal

    def begin_step(self, targets: Any) -> None:
        """Begin a step, or an evaluation: check whether state that it reads was changed from outside.

        Numbers among the targets that belong to no sample count as such state.
        """
        self.of_each, self.rests = None, {}
        name, beside = None, self._beside if targets is None or isinstance(targets, Tensor) else _numbers(targets)
        if self._state is None:
            self._state = self._begun = FunctionState(self._function, self._name)
        elif (name := self._state.changed()) is not None:
            self._state, self.tables = FunctionState(self._function, self._name), class_weights(self._function)
        elif beside != self._beside:
            name = "a number among the targets"
        self._beside = beside
        if name is not None and self.rule is not None:
            self.since, self._old, self.rule = self.since or name, self.rule, None
            self._num_changes += 1

    def before_call(self, output: Any) -> None:
        """Save the function's state, before a call by which it is examined."""
        if self.rule is None and not self._is_ours:
            device = next((tensor.device for tensor in tensors_of(output)), torch.device("cpu"))
            self._first = FunctionKept(self._function, device)

    def find(self, found: Any, output: Any, targets: Any, samples: int) -> LossWeight | None:
        """Return its reduction; if not known, examine it with the output and targets of a call just made.

        None: it has no gradient, which decides nothing. Its state after that call is kept.
        """
        if self.rule is not None:
            return self.rule
        if self.is_blind and isinstance(found, Tensor) and not _has_gradient(found, output):
            self.was_blind = True
            return None
        self._writes = self._writes or (self._first is not None and self._first.have_drawn())
        finding = self._examine(found, output, targets, samples)
        self._first, self._old, self.is_blind = None, None, finding is WITHOUT_GRADIENT
        self.was_blind |= self.is_blind
        if self.is_blind:
            return None
        usual = Over.STATED if isinstance(found, tuple) else Over.SAMPLES
        self.rule, self.refusal = finding.weight or LossWeight(usual), self.refusal or finding.why
        return self.rule

    def doubt(self, batch: RealBatch | None, probe: SampleUnit | None, step: int) -> None:
        """Check after a step, or evaluation: whether its own calls changed state that it reads; whether its rule holds.

        Args:
            batch: the step's microbatches, if they are compared.
            probe: a few samples of earlier ones.
            step: its number, for messages.
        """
        if self.rule is None:
            return
        moved = self._state is not None and self._state.changed()
        if moved:
            self._writes = True
            assert self._state is not None
            names = self._state.written()
            if probe is not None and not names <= self._harmless:
                self._require_harmless(self._state, probe)
            self._harmless |= names
            self._state = FunctionState(self._function, self._name)
        if batch is not None and not self.refusal and (why := self._misfit(batch, self.rule)):
            self.refusal = _OTHERWISE.format(self.rule, step, why)
        self.refusal = why_rests_misfit([self.rests]) or self.refusal

    def compare_values(self, batch: RealBatch) -> None:
        """Compare its values of a step's microbatches with its reduction; see `late`."""
        if self.rule is None or self._way is None or not self.is_compared:
            return
        kept = FunctionKept(self._function, batch.device) if self._writes else None
        late = compare_values(self._function, self.rule, self.tables, batch, self._way)
        if kept is not None:
            kept.put_back()
        self.late = self.late if late is None else late.or_before(self.late)

    def conclude(self, step: int) -> None:
        """Read the result of the comparison by values, which synchronizes with the device."""
        if self.late is not None and self.late.is_off and self.rule is not None and not self.refusal:
            why = f"of all together it is {self.late.value:.6g}, and {self.late.right:.6g} would be right"
            self.refusal = _OTHERWISE.format(self.rule, step, why)

    def _require_harmless(self, state: FunctionState, probe: SampleUnit) -> None:
        with versions_kept(self._function):
            found = self._kind(self._function, *probe.built(), probe.samples)
            name = found.depends_on_calls(probe, state)
        if name is not None:
            self.refusal = self.refusal or WRITES.format(name)

    def _examine(self, found: Any, output: Any, targets: Any, samples: int) -> WeightFinding:
        """Examine it, starting from its state before a call."""
        if self._is_ours and isinstance(found, tuple):
            return WeightFinding(LossWeight(Over.STATED))
        if self._old is not None:
            if name := self._goes_by_written(output, targets, samples):
                return WeightFinding(None, WRITES.format(name))
            if self._holds_still(output, targets, samples):
                return WeightFinding(self._old)
        if self._is_loss and any(found is tensor for tensor in tensors_of(output)):
            return WeightFinding(None, HANDED_ON)
        self._kind = _KINDS[self._is_loss, isinstance(found, tuple)]
        with versions_kept(self._function):
            after = FunctionKept(self._function, torch.device("cpu") if self._first is None else self._first.device)
            if self._first is not None:
                self._first.put_back()
            try:
                its = self._kind(self._function, output, targets, samples, sliced=self._is_cut, apart=self.apart)
                finding = its.examine_loss()
            finally:
                after.put_back()
        return finding

    def _goes_by_written(self, output: Any, targets: Any, samples: int) -> str | None:
        """Return the name of state that earlier calls wrote, and that it reads only now; None: none."""
        if not self._harmless or self._begun is None:
            return None
        with versions_kept(self._function):
            its = self._kind(self._function, output, targets, samples, apart=self.apart)
            return its.goes_by_written(self._begun, self._harmless)

    def _holds_still(self, output: Any, targets: Any, samples: int) -> bool:
        """Return whether a microbatch confirms its old reduction, though state that it reads has changed."""
        if samples == 1 or self._num_changes & (self._num_changes - 1) == 0:
            return False  # examine again in full, ever more rarely
        real = RealBatch(1)
        real.keep(output, targets, samples, self.apart)
        assert self._old is not None
        return not self._misfit(real, self._old)

    def _misfit(self, batch: RealBatch, rule: LossWeight) -> str:
        with versions_kept(self._function):
            self.rests = {} if self._is_ours else batch.rests(self._kind, self._function)
            found = batch.misfit(self._kind, self._function, rule, self.tables)
        self.of_each, self._way = found.of_each, found.way or self._way
        return found.why


_KINDS: dict[tuple[bool, bool], type[LossExamination]] = {
    (True, False): LossExamination,
    (True, True): StatedExamination,
    (False, False): MetricExamination,
    (False, True): StatedMetricExamination,
}


def _numbers(targets: Any) -> list[object]:
    """Return the numbers among targets that belong to no sample; for tensors on a device, their ids."""
    tree, tensors = flatten(targets)
    return [*tree.numbers(), *[t.item() if t.device.type == "cpu" else id(t) for t in tensors if not t.dim()]]


def _is_ours(function: Any) -> bool:
    while isinstance(function, partial):  # of a term of a sum of means, its first function
        is_term = str(getattr(function.func, "__module__", "")).startswith(_OF_THIS_PACKAGE) and function.args
        function = function.args[0] if is_term else function.func
    return str(getattr(function, "__module__", "")).split(".")[0] == _OF_THIS_PACKAGE


def _has_gradient(loss: Any, output: Any) -> bool:
    """Return whether a loss has a nonzero gradient of an output; False without a graph."""
    leaves = [t for t in tensors_of(output) if t.requires_grad]
    if not isinstance(loss, Tensor) or not loss.requires_grad or not leaves:
        return False
    gradients = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    return any(g is not None and bool(g.any()) for g in gradients)
