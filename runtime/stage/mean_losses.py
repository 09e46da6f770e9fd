"""Losses weighed by what they are over, so that the loss of microbatches is that of the whole batch.

    microbatch 0    targets 3 4 – –    mean 2.0      sum 4.0, weight 2 ─┐
    microbatch 1    targets 1 7 5 2    mean 1.0      sum 4.0, weight 4 ─┴▶ 8.0 / 6     not (2.0 + 1.0) / 2

A loss function that returns (sum, weight) says so itself, and `loss_over` says it of one that returns a number. Unless
that is given, either is examined when it is first called (`examine.loss_weights`, `examine.stated_weights`); what was
found is bound, and ranks agree on it before the optimizer first steps. Where blocks have auxiliary losses, which are
added to the loss of each microbatch as it is, means count by samples (`even_weights`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintsched.errors import MisfitError

from ..blocks.trees import DIFFERENTIABLE, map_tensors, tensors_of
from ..comm import Group
from ..comm.control import gather_texts
from ..examine.divisors import divisor_of
from ..examine.functions_kept import FunctionState, class_weights
from ..examine.loss_rules import WITHOUT_GRADIENT, Finding, LossWeight, Over, named
from ..examine.loss_weights import examine_loss
from ..examine.metric_weights import examine_metric
from ..examine.real_batches import RealBatch
from ..examine.stated_weights import doubt_of_stated
from ..job.choices import LossOver
from ..splitting.sum_of_means import SumOfMeans
from .even_weights import EvenWeights

_STATED = "stated"
_NO_WEIGHT = (
    "the loss function gives one number, and of microbatches it is not that of the batch: {}; return (sum, weight), or "
    "quintsched.runtime.SumOfMeans for means over several things"
)
_NOT_STATED = (
    "the loss function gives two things, which have to be a sum and what it is over, as microbatches add both up: {}; "
    'return these, such as F.cross_entropy(…, reduction="sum"), (targets != -100).sum(), or a mean alone'
)
_BY_SAMPLES = (Over.SAMPLES, Over.MICROBATCH)


class Summed(NamedTuple):
    """A loss that is a sum over the samples, so that those of all microbatches are added up, and not divided."""

    loss: Tensor


Found = Any
"""What a loss function gives: a loss, or (sum, weight)."""


class WeighedLoss:
    """A loss function of the user's, weighed by what it is over.

    Args:
        loss_fn: the user's.
        over: what it is over, as the user says; None: it is examined.
        is_cut: whether sequences are cut, in training.
        is_captured: whether steps are replayed, in which nobody looks at what a microbatch weighs.

    Attributes:
        has_others: whether blocks have losses of their own beside it.
        means: the loss, where it is a sum of means.
        is_settled: whether all ranks have agreed on what it is over.
        is_due: whether what it was found to be over is compared with the microbatches of this step, on all ranks.
        refusal: why no weights of microbatches make it the loss of the batch; "": some do.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Found],
        over: LossOver | None = None,
        *,
        is_cut: bool = False,
        is_captured: bool = False,
    ) -> None:
        self._loss_fn, self._is_cut, self.has_others = loss_fn, is_cut, False
        self._weight = None if over is None else LossWeight(Over(over))
        self._tables = class_weights(loss_fn) if over is None else []
        self._even: EvenWeights | None = None
        self._is_captured = is_captured
        self._is_stated, self._is_given = False, over is not None
        self._nothing = [torch.zeros((), dtype=torch.bool)]
        self.is_settled, self.refusal, self._of_metrics = False, "", ""
        self.means = loss_fn if isinstance(loss_fn, SumOfMeans) else None
        self._totals = torch.zeros(0, dtype=torch.float64)
        self._state: FunctionState | None = None
        self._real: RealBatch | None = None
        self._old: LossWeight | None = None
        self._since, self._step = "", 0
        self._was_called = self._is_blind = False
        self.is_due = False

    @property
    def is_changed(self) -> bool:
        """Whether what the loss goes by has changed since ranks agreed on what it is over."""
        return bool(self._since)

    def begin_step(self, number: int | None, units: int, copies: int) -> None:
        """Begin a step of so many units on each of `copies` ranks; in some the found weight is compared with them.

        An evaluation has no number.
        """
        trains = number is not None
        is_found = not self._is_given and self.means is None and not (self._is_stated and self.is_settled)
        self.is_due = number is not None and is_found and not number & (number - 1)
        self._step = number or 0
        self._real = RealBatch(units, copies) if self.is_due else None
        if self._state is not None and (name := self._state.changed()) is not None:
            self._since, self._tables = self._since or name, class_weights(self._loss_fn)
            self._weight, self._old, self._state = None, self._weight or self._old, None
        if self._since and trains:
            self._real = RealBatch(units, copies)

    def end_step(self) -> None:
        """Take what the loss goes by as it is now."""
        is_bare = self._weight is not None and not self._is_given and self.means is None
        is_watched = is_bare and self._was_called and "vocabulary" not in getattr(self._loss_fn, "keywords", {})
        if is_watched and (self._state is None or self._state.changed() is not None):
            self._state = FunctionState(self._loss_fn)
        self._was_called, self._real, self.is_due = False, None, False

    @property
    def is_bare(self) -> bool:
        """Whether a microbatch weighs as much as it has samples of the usual number."""
        return self._weight is not None and self._weight.over in _BY_SAMPLES

    def __call__(self, output: Any, targets: Any, samples: int = 1, usual: int = 1, slices: int = 1) -> Found:
        """Return the loss of a microbatch, or its sum and weight.

        `samples` is how many it has; one of `usual` weighs 1 where the loss counts by samples. Each sequence is cut
        into as many `slices`.
        """
        if self._is_stated:
            return _both(self._loss_fn(output, targets))
        if self.means is not None:
            if self._weight is None:
                self._find_sums(output, targets, samples)
            return Summed(self.means.over(output, targets, self._totals))
        rule = self._even.rule if self._even is not None else self._weight
        if (rule is None or rule.over is Over.DIVISOR) and not torch.is_grad_enabled():
            with torch.enable_grad():  # its graph has the divisor
                leaves = map_tensors(lambda t: t.detach().requires_grad_(t.dtype in DIFFERENTIABLE), output)
                weighed = self(leaves, targets, samples, usual, slices)
            parts = [part.detach() if isinstance(part, Tensor) else part for part in weighed]
            return Summed(*parts) if isinstance(weighed, Summed) else tuple(parts)
        if self._weight is not None and self._weight.is_guarded and torch.is_grad_enabled():
            self._guard(output)
        found = self._loss_fn(output, targets)
        if isinstance(found, Tensor) and not found.dim():
            self._was_called = True
            if self._weight is None:
                rule = self._find(found, output, targets, samples)
                if rule is not None and rule.is_guarded:
                    self._guard(output)
            if self._real is not None and not self._is_given and not self.has_others:
                self._real.keep(output, targets, samples)
            return self._weigh(found, output, targets, samples, usual, slices)
        if self._weight is None and isinstance(found, tuple) and len(found) == 2:
            self._is_stated = True
            self.refusal = doubt_of_stated(self._loss_fn, output, targets, samples, sliced=self._is_cut)
        elif self._weight is not None and not self._is_given and isinstance(found, tuple):
            raise MisfitError("the loss function has given one number, and now a tuple; return (sum, weight) always")
        return found

    def _guard(self, output: Any) -> None:
        """Let an output have no gradient where its targets weigh nothing, as that of 0 / 0 is not finite."""
        nothing = self._nothing = [torch.zeros((), dtype=torch.bool)]
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: torch.where(nothing[0], 0.0, gradient))

    def begin(self, targets: Iterable[Any], device: torch.device, group: Group | None) -> None:
        """Add up how many things each mean of a sum of means is over, in all microbatches (collective)."""
        assert self.means is not None
        total = torch.zeros(len(self.means.terms), dtype=torch.float64, device=device)
        for some in targets:
            total += self.means.weights(some).to(total.device)
        if group is not None:
            group.all_reduce(total).wait()
        if self._totals.shape == total.shape and self._totals.device == total.device:
            self._totals.copy_(total)  # where a graph of the device knows it
        else:
            self._totals = total

    def _find_sums(self, output: Any, targets: Any, samples: int) -> None:
        """Find out whether the sums of a sum of means are sums."""
        assert self.means is not None
        self._weight = LossWeight(Over.SUM)
        for number, term in enumerate(self.means.terms):
            if why := doubt_of_stated(partial(_term, *term), output, targets, samples, sliced=self._is_cut):
                self.refusal = f"term {number} of its SumOfMeans is no sum with what it is over: {why}"

    def _find(self, found: Tensor, output: Any, targets: Any, samples: int) -> LossWeight | None:
        """Find out what the loss is over, if it has a gradient; one that was only handed on says it by its graph."""
        if self._old is not None and self._holds_still(output, targets, samples):
            self._weight, self._old = self._old, None
            return self._weight
        if self._is_blind and not _has_gradient(found, output):
            return None
        finding = (
            Finding(LossWeight(Over.DIVISOR, is_guarded=True)) if any(found is t for t in tensors_of(output)) else None
        )
        if finding is None:
            finding = examine_loss(self._loss_fn, output, targets, samples, sliced=self._is_cut)
        elif not isinstance(divisor_of(found), Tensor):
            finding = Finding(None, "a block has found it, and it is only handed on")
        if finding is WITHOUT_GRADIENT:
            self._is_blind = True
            return None
        self._weight, self.refusal = finding.weight or LossWeight(Over.SAMPLES), finding.why
        if self.has_others and self._weight.over not in (Over.SUM, Over.SAMPLES):
            self._even, self._weight = EvenWeights(self._weight), LossWeight(Over.SAMPLES)
            if self._is_captured:
                self.refusal = (
                    f"blocks have losses of their own beside it, and it is a mean over {self._even.rule.over}"
                )
        return self._weight

    def _holds_still(self, output: Any, targets: Any, samples: int) -> bool:
        """Whether a microbatch shows that the loss is over the same, though what it goes by has changed."""
        assert self._old is not None
        real = RealBatch(1)
        real.keep(output, targets, samples)
        return samples > 1 and not real.misfit(self._loss_fn, self._old, self._tables)

    def _weigh(self, found: Tensor, output: Any, targets: Any, samples: int, usual: int, slices: int) -> Found:
        """Return the sum and the weight of a loss."""
        rule = self._weight or LossWeight(Over.SAMPLES)
        if rule.over is Over.SUM:
            return Summed(found)
        if self._even is not None:
            self._require_even(self._even, found, output, targets, samples)
        if rule.over in _BY_SAMPLES:
            share = samples / usual
            return found * share if share != 1 else found, share if rule.by_slices else share / slices
        weight = self._weight_by(rule, found, output, targets, samples)
        if rule.over is Over.TOKENS:
            return found * weight, weight
        is_nothing = self._nothing[0] = (weight == 0) & found.detach().isnan()  # 0 / 0; all else is said to be infinite
        wide = found.to(torch.promote_types(found.dtype, torch.float32))
        return torch.where(is_nothing, 0.0, wide * weight), weight

    def _weight_by(self, rule: LossWeight, found: Tensor, output: Any, targets: Any, samples: int) -> Tensor | float:
        """Return what a microbatch weighs by a rule for means that are not over samples."""
        if rule.over is Over.TOKENS:
            length = next(t.shape[1] for t in tensors_of(output) if t.dim() > 1 and t.dtype in DIFFERENTIABLE)
            return float(samples * length)
        if rule.over is not Over.DIVISOR:
            return rule.of_targets(named(targets), self._tables)
        weight = _divisor_of(found)
        return torch.where((found.detach() == 0) & (weight == 1), 0, weight) if rule.is_clamped else weight

    def _require_even(self, even: EvenWeights, found: Tensor, output: Any, targets: Any, samples: int) -> None:
        """Refuse a microbatch whose samples do not weigh as those of others, before weights first change on all ranks.

        Raises `MisfitError` later.
        """
        why = even.doubt(self._weight_by(even.rule, found, output, targets, samples), samples)
        self.refusal = self.refusal or why
        if why and self.is_settled:
            raise MisfitError(_NO_WEIGHT.format(why))

    def settle(self, world: Group, *, matters: bool, of_metrics: str = "", again: bool = False) -> None:
        """Agree with all ranks on what the loss is over, once any has found it (collective until then).

        Unless it `matters`, as there is one microbatch alone, it may be anything. `of_metrics` is why this rank refuses
        one; `again`: what the loss of some rank goes by has changed. Raises `MisfitError` on all ranks.
        """
        if matters and self._real is not None and self._weight is not None and not self.refusal:
            why = self._real.misfit(self._loss_fn, self._weight, self._tables)
            if why:
                self.refusal = f"it was found to be {self._weight}, but in step {self._step} it is not so: {why}"
        if not self.is_settled or self.is_due or again:
            self._agree(world, of_metrics)
        if self._of_metrics and matters:
            raise MisfitError(self._of_metrics)
        if self.refusal and matters:
            raise MisfitError(
                (_NOT_STATED if self._is_stated else _NO_WEIGHT).format(self.refusal)
                + ', or say that the loss of each microbatch is meant: Engine(…, loss_over="microbatch"), in a job '
                "train.loss_over: microbatch"
            )

    def _agree(self, world: Group, of_metrics: str) -> None:
        """Hear from all ranks what each has found in this step."""
        is_known = self._weight is not None and (self._was_called or not self.is_settled)
        of_each = None if self._even is None else self._even.of_each
        rule = self._weight and asdict(self._weight) | {"of_each": of_each}
        mine = json.dumps(rule) if rule and is_known else _STATED * self._is_stated
        since = self._since and f"since {self._since} has changed, "
        refusal = self.refusal and since + self.refusal
        said = f"{mine}\n{refusal}\n{of_metrics}\n{'blind' * self._is_blind}\n"
        said += str(self._real.of_each or "") if self._real is not None else ""
        told = [text.split("\n") for text in gather_texts(world, said)]
        self.refusal, self._of_metrics = (next((row[k] for row in told if row[k]), "") for k in (1, 2))
        found = list(dict.fromkeys(row[0] for row in told if row[0]))
        self._is_stated = found == [_STATED] or (self._is_stated and not found)
        if len(found) > 1 and not self.refusal:
            self.refusal = "ranks found it to be over unlike things"
        if len({row[4] for row in told if row[4]}) > 1 and not self.refusal:
            self.refusal = f"in step {self._step} it is over unlike numbers of things for a sample on some ranks"
        if found and not self.refusal:
            self._take_over(found[0])
            is_blind = any(row[3] for row in told) and not (self._weight and self._weight == LossWeight(Over.SAMPLES))
            self.refusal = "some microbatches of a step have a gradient, and others have none" if is_blind else ""
            self._is_blind = False
        self.is_settled, self._since = self.is_settled or bool(found), ""

    def _take_over(self, text: str) -> None:
        """Take over what some rank has found."""
        if text != _STATED:
            data = json.loads(text)
            data.pop("of_each")
            self._weight = LossWeight(**{**data, "over": Over(data["over"])})


def _term(
    add: Callable[[Any, Any], Tensor], count: Callable[[Any], Tensor | float], output: Any, targets: Any
) -> tuple[Tensor, Tensor | float]:
    return add(output, targets), count(targets)


def _divisor_of(found: Tensor) -> Tensor | int:
    """Return what a loss was divided by; one that is zero may not have been, as it is of nothing.

    Raises `MisfitError` for another.
    """
    weight = divisor_of(found)
    if weight is None and found.detach().any():
        raise MisfitError(
            "the loss function has given a sum that it divides at its end, and now a number that it does not; return "
            "(sum, weight) always"
        )
    return 0 if weight is None else weight


def _has_gradient(loss: Tensor, output: Any) -> bool:
    """Whether a loss has any with respect to an output; without a graph nobody knows."""
    leaves = [t for t in tensors_of(output) if t.requires_grad]
    if not loss.requires_grad or not leaves:
        return False
    gradients = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    return any(g is not None and bool(g.any()) for g in gradients)


def _both(found: Found) -> Found:
    """Return what a loss gives that has given (sum, weight)."""
    if isinstance(found, Tensor):
        raise MisfitError("the loss function has given (sum, weight), and now one number; return (sum, weight) always")
    return found


class WeighedMetric:
    """A metric of the user's, weighed by what it is over: a sum, (sum, weight), or a mean, which is examined once.

    Attributes:
        refusal: why it is none of these, in words; "": it is.
    """

    def __init__(self, name: str, metric: Callable[..., Any]) -> None:
        self._name, self._metric = name, metric
        self._weight: LossWeight | None = None
        self._tables: list[Tensor] = []
        self.refusal = ""

    def __call__(self, output: Any, targets: Any, samples: int = 1) -> tuple[Any, Any]:
        """Return the sum and the weight of a microbatch; a weight of 0 is that of its loss."""
        found = self._metric(output, targets)
        if isinstance(found, tuple) and len(found) == 2:
            return found
        if self._weight is None:
            self._find(output, targets, samples)
        rule = self._weight
        assert rule is not None
        if rule.over is Over.SUM:
            return found, 0
        weight = samples if rule.over is Over.SAMPLES else rule.of_targets(named(targets), self._tables)
        wide = torch.as_tensor(found).double()
        return torch.where(torch.as_tensor(weight, device=wide.device) == 0, 0.0, wide * weight), weight

    def _find(self, output: Any, targets: Any, samples: int) -> None:
        self._tables = class_weights(self._metric)
        weight, why = examine_metric(self._metric, output, targets, samples)
        self._weight = weight or LossWeight(Over.SUM)
        if why:
            self.refusal = f"metric {self._name!r} gives one number, of which {why}; let it return (sum, weight)"
