"""Losses with a weight per microbatch, so that the losses of microbatches add up to that of the whole batch.

    microbatch 0    targets 3 4 – –    mean 2.0      sum 4.0, weight 2 ─┐
    microbatch 1    targets 1 7 5 2    mean 1.0      sum 4.0, weight 4 ─┴▶ 8.0 / 6     not (2.0 + 1.0) / 2

A loss function that returns (sum, weight) states its weight; for a plain number, `loss_over` may state its unit. A loss
without `loss_over` is examined at its first call, and checked later (`losses.watched_loss`); ranks agree on the finding
before the optimizer first steps. Beside losses of blocks, means are weighted by samples (`EvenWeights`), as both are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintsched.errors import MisfitError

from ..blocks.sum_of_means import SumOfMeans, term_of
from ..blocks.trees import DIFFERENTIABLE, TensorSpec, map_tensors, tensors_of
from ..comm import Group
from ..settings.allowed_setting_values import LossOver
from .experiments.find_loss_reduction import LossExamination
from .loss_reductions import EvenWeights, LossWeight, Over, named
from .recheck_reduction_on_batches import RealBatch
from .save_and_restore_loss_state import FunctionKept, versions_kept
from .watched_loss import Examined

NO_WEIGHT = (
    "the loss function gives one number, and of microbatches it is not that of the batch: {}; return (sum, weight), or "
    "quintsched.runtime.SumOfMeans for means over several things"
)
NOT_STATED = (
    "the loss function gives two things, which have to be a sum and what it is over, as microbatches add both up: {}; "
    'return these, such as F.cross_entropy(…, reduction="sum"), (targets != -100).sum(), or a mean alone'
)
IN_PLACE_OPERATIONS = (
    "the loss function changes its targets or its output in place, which other microbatches and metrics see too; write "
    "targets = targets.masked_fill(…), or output = output / 2, which are other tensors"
)
LEARNED = (
    "the loss function gives (sum, weight), and its weight has a gradient, which would be lost, as the weights of "
    "microbatches are added up and divide at the end; return weight.detach(), or sum / weight, the mean of each "
    'microbatch, and say so: Engine(…, loss_over="microbatch"), in a job train.loss_over: microbatch'
)
_BY_SAMPLES, SUMS = (Over.SAMPLES, Over.MICROBATCH), (Over.SUM, Over.STATED)


_NEXT_TO_NOTHING = 1e-30


class Counted(NamedTuple):
    """A microbatch's loss, its weight, and the factor it counts by; `is_sum`: sums are added up, not divided."""

    loss: Tensor
    weight: Tensor | float
    times: float = 1.0
    is_sum: bool = False


_counted: Callable[[tuple[Any, ...]], Counted] = partial(tuple.__new__, Counted)

LossResult = Any
"""Result of a loss function: a loss, or (sum, weight)."""


class WeighedLoss:
    """A user loss function, weighted by the number of elements that its mean is over.

    Args:
        loss_fn: the loss function.
        over: the unit of its mean, as the caller states it; None: it is examined.
        is_cut: whether sequences are sharded or sliced in training.
        is_captured: whether steps are replayed from a graph, without a check of weights on the host.

    Attributes:
        function: the user function.
        is_wanted: whether it is called at all, as in training.
        has_auxiliary: whether blocks return auxiliary losses.
        supposed: its presumed unit, by which auxiliary losses are weighted before its first call.
        has_supposed: whether an auxiliary loss was weighted so that another unit would give another result.
        is_alone: whether there is a single microbatch.
        is_uneven: whether sample weights differ between microbatches, with auxiliary losses present.
        is_learned: whether it returned a weight that requires a gradient.
        is_cut: whether it is called with slices of sequences.
        means: the loss, where it is a `SumOfMeans`.
        examined: findings about it, or about its terms; empty where the unit is stated.
        real: keeps the microbatches of a step, if they are compared with the finding.
        was_called: whether it was called in this step.
        is_known: whether its unit is known on this rank, and the state that it reads is unchanged.
        is_settled: whether all ranks have agreed on its unit.
        watched: the context that the user's function runs in, if any.
        apart: paths of output tensors without a sample dimension, whatever their rows.
        misuses: why this rank refuses its result, in words, exchanged when ranks settle the step; None: raise at once.
    """

    def __init__(
        self,
        loss_fn: Callable[..., LossResult],
        over: LossOver | None = None,
        *,
        is_cut: bool = False,
        is_captured: bool = False,
    ) -> None:
        self.function, self.is_wanted, self.has_auxiliary = loss_fn, True, False
        self.is_cut, self.means = is_cut, loss_fn if isinstance(loss_fn, SumOfMeans) else None
        functions = [loss_fn] if self.means is None else [partial(term_of, *term) for term in self.means.terms]
        self.examined = [Examined(function, "the loss", is_cut=is_cut) for function in functions if over is None]
        self._weight = None if over is None else LossWeight(Over(over))
        self._is_given, self._is_captured = over is not None, is_captured
        self._evens, self._beside = list[EvenWeights](), list[LossWeight]()
        self._nothing = [torch.zeros((), dtype=torch.bool)]
        self._totals = torch.zeros(0, dtype=torch.float64)
        self._shares: dict[object, tuple[Any, ...]] = {}
        self._shares_of, self._is_usual = self._weight, False
        self.real: RealBatch | None = None
        self.is_settled = self.was_called = self.is_alone = self.is_uneven = self.is_learned = False
        self.watched: AbstractContextManager[Any] | None = None
        self._refusal, self.is_known = "", over is not None
        self.supposed, self.has_supposed = Over.SAMPLES, False
        self.apart, self.misuses = frozenset[str](), None if is_captured else list[str]()

    @property
    def refusal(self) -> str:
        """Reason why no weights of microbatches give the loss of the batch, as far as this rank sees; "": some do."""
        for number, examined in enumerate(self.examined):
            if why := examined.refusal:
                is_term = self.means is not None
                return f"term {number} of its SumOfMeans is no sum with what it is over: {why}" if is_term else why
        return self._refusal

    @property
    def rule(self) -> LossWeight | None:
        """Rule for the weight of a microbatch; None: unknown, or state that it reads has changed."""
        return None if None in [examined.rule for examined in self.examined] else self._weight

    @property
    def of_each(self) -> list[float | None]:
        """Weight of each sample, for means not over samples, where blocks have auxiliary losses."""
        return [even.of_each for even in self._evens]

    def begin_step(self) -> None:
        """Begin a step, whose samples may have other weights than earlier ones."""
        for even in self._evens:
            even.of_each = None

    @property
    def weighs_otherwise(self) -> bool:
        """Whether samples have other weights than those that ranks agreed on."""
        return any(even.of_each not in (None, even.agreed) for even in self._evens)

    def take_over(self, rule: LossWeight) -> None:
        """Adopt the rule that some rank has found, and all have agreed on."""
        self._weight = rule
        for even in self._evens:
            even.agreed = even.of_each or even.agreed
        for examined in self.examined:
            if examined.rule is None or (self.means is None and examined.rule.over is rule.over):
                examined.rule = rule if self.means is None else LossWeight(Over.STATED)

    @property
    def is_bare(self) -> bool:
        """Whether a microbatch is weighted by its number of samples alone."""
        return self._weight is not None and self._weight.over in _BY_SAMPLES

    def expect_auxiliary(self, beside: Sequence[LossWeight] = ()) -> None:
        """Register that blocks return auxiliary losses, and the rules of those that are means not over samples."""
        self.has_auxiliary, self._beside = True, list(beside)
        if self._weight is not None:
            self._weigh_evenly(self._evens[0].rule if self._evens else self._weight)

    def _weigh_evenly(self, rule: LossWeight) -> None:
        """Weight means by samples, and check that samples weigh the same in all microbatches."""
        if rule.over in SUMS or rule.over is Over.MICROBATCH:
            return
        rules = [one for one in (rule, *self._beside) if one.over is not Over.SAMPLES]
        self._evens = [EvenWeights(one) for one in dict.fromkeys(rules)]
        if rule.over is not Over.SAMPLES:
            self._weight = LossWeight(Over.SAMPLES)
        if self._evens and self._is_captured:
            self._refusal = f"blocks have losses of their own beside it, and there is {self._evens[0].rule}"

    def try_kind(self, output: Any, targets: Any, samples: int) -> Over:
        """Return its unit, by a trial call on made-up numbers in the shape of an output."""
        if self._weight is not None or self.means is not None:
            return Over.SUM if self.means is not None or self._weight is None else self._weight.over
        kept = FunctionKept(self.function, next((t.device for t in tensors_of(output)), torch.device("cpu")))
        try:
            with versions_kept(self.function):
                with torch.no_grad():
                    found = self.function(output, targets)
                if isinstance(found, tuple):
                    return Over.STATED
                weight = (
                    LossExamination(self.function, output, targets, samples, apart=self.apart).examine_loss().weight
                )
            return Over.SAMPLES if weight is None else weight.over
        except Exception:  # user code may raise on numbers that no block computed
            return Over.SAMPLES
        finally:
            kept.put_back()

    def weigh_auxiliary(self, loss: Tensor, samples: int, usual: int) -> Tensor:
        """Return an auxiliary loss of a microbatch, weighted by samples unless losses are sums."""
        if samples == usual:
            return loss
        self.has_supposed = self.has_supposed or self._weight is None
        over = self.supposed if self._weight is None else self._weight.over
        return loss if over in SUMS else (loss if samples else loss.nan_to_num()) * (samples / usual)

    def __call__(self, output: Any, targets: Any, samples: int = 1, usual: int = 1, slices: int = 1) -> Counted:
        """Return the loss of a microbatch with its weight; raises `MisfitError` for an invalid result.

        `samples` is its number of samples; one of `usual` samples weighs 1 where the loss is weighted by samples.
        Each sequence is cut into as many `slices`.
        """
        if not samples:  # of a unit that is computed for what replicas exchange
            return self._nothing_of(output, 0.0)
        if not self.was_called:
            self._begin_calls()
        if self._is_usual and isinstance(output, Tensor):
            found = self.function(output, targets)
            if isinstance(found, Tensor) and not found.dim() and not found.is_complex():
                key = output.shape, output.dtype, samples, usual, slices
                if key not in self._shares:
                    self._shares[key] = self._weigh(found, output, targets, samples, usual, slices)[1:]
                return _counted((found, *self._shares[key]))
            return self._result(found, output, targets, samples, usual, slices)
        if self.real is not None:
            self.real.keep(output, targets, samples, self.apart)
        if self.means is not None:
            self._find_terms(output, targets, samples)
            with self.watched or nullcontext():
                return Counted(self.means.over(output, targets, self._totals), 0.0, is_sum=True)
        if not self.is_known:
            output = _without_leaves(output)
            for examined in self.examined:
                examined.before_call(output)
        if self._weight is not None and self._weight.is_guarded and torch.is_grad_enabled():
            output = _without_leaves(output)
            self._guard(output)
        given = [] if self.is_known or self.is_alone else [(t, t._version) for t in tensors_of((output, targets))]
        with self.watched or nullcontext():
            found = self.function(output, targets)
        if given and any(tensor._version != version for tensor, version in given):
            raise MisfitError(IN_PLACE_OPERATIONS)
        return self._result(found, output, targets, samples, usual, slices)

    def _begin_calls(self) -> None:
        """Find whether microbatches of one shape weigh the same in this step, and are neither kept nor examined."""
        rule, self.was_called = self._weight, True
        if rule is not self._shares_of:
            self._shares_of, self._shares = rule, {}
        bare = rule is not None and not rule.is_guarded and (rule.over in _BY_SAMPLES or rule.over is Over.TOKENS)
        others = self.real, self.means, self.watched
        self._is_usual = bare and self.is_known and not self._evens and all(one is None for one in others)

    def _result(self, found: LossResult, output: Any, targets: Any, samples: int, usual: int, slices: int) -> Counted:
        """Return what the user's function has returned, with its weight."""
        is_number = isinstance(found, Tensor) and not found.dim() and not found.is_complex()
        if isinstance(found, tuple) and any(isinstance(w, Tensor) and w.requires_grad for w in found[1:]):
            self.is_learned, found = True, (found[0], *map_tensors(Tensor.detach, found[1:]))
        if not self.is_known and (is_number or (isinstance(found, tuple) and len(found) == 2)):
            self._find(found, output, targets, samples)
        if self._weight is not None and isinstance(found, tuple) != (self._weight.over is Over.STATED):
            self._require_kind(found)
        return self._weigh(found, output, targets, samples, usual, slices) if is_number else _stated(found)

    def defer(self, error: MisfitError, output: Any) -> Counted:
        """Record why a microbatch's loss is refused, and return a zero loss; raise at once without `misuses`."""
        note_misuse(error, self.misuses)
        return self._nothing_of(output, 1.0)

    def _nothing_of(self, output: Any, weight: float) -> Counted:
        nothing = sum((t.sum() * 0 for t in tensors_of(output) if t.requires_grad), torch.zeros(()))
        is_sum = self._weight is not None and self._weight.over is Over.SUM
        return Counted(nothing, 0.0 if is_sum else weight, is_sum=is_sum)

    def _require_kind(self, found: LossResult) -> None:
        """Raise `MisfitError` for a tuple where the loss was a number before, or the other way round."""
        is_pair = isinstance(found, tuple)
        if not self._is_given and (is_pair or isinstance(found, Tensor)):
            was, now = ("one number", "a tuple") if is_pair else ("(sum, weight)", "one number")
            raise MisfitError(f"the loss function has given {was}, and now {now}; return (sum, weight) always")

    def _guard(self, output: Any) -> None:
        """Zero the gradient of an output whose targets weigh nothing, since that of 0 / 0 is NaN."""
        nothing = self._nothing = [torch.zeros((), dtype=torch.bool)]
        for tensor in tensors_of(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: torch.where(nothing[0], 0.0, gradient))

    def begin_means(self, targets: Iterable[Any], device: torch.device, group: Group | None) -> None:
        """Sum the number of elements of each mean of a `SumOfMeans`, over all microbatches (collective)."""
        assert self.means is not None
        total = torch.zeros(len(self.means.terms), dtype=torch.float64, device=device)
        for some in targets:
            total += self.means.weights(some).to(total.device)
        if group is not None:
            group.all_reduce(total).wait()
        if self._totals.shape == total.shape and self._totals.device == total.device:
            self._totals.copy_(total)  # a captured graph reads this memory
        else:
            self._totals = total

    def _find_terms(self, output: Any, targets: Any, samples: int) -> None:
        """Examine whether the terms of a `SumOfMeans` are sums with their numbers of elements."""
        for examined in () if self.is_known else self.examined:
            examined.find((), output, targets, samples)
        self._weight, self.is_known = LossWeight(Over.SUM), True

    def _find(self, found: LossResult, output: Any, targets: Any, samples: int) -> None:
        """Examine the unit of the loss, if it has a gradient; a loss passed on by a block shows it by its graph."""
        for examined in self.examined:
            is_new = examined.rule is None
            rule = examined.find(found, output, targets, samples)
            if not is_new or rule is None:
                continue
            self._weight, self._evens, self.is_known = rule, [], True
            if self.has_auxiliary:
                self._weigh_evenly(rule)
            if self._weight.is_guarded:
                self._guard(output)

    def _weigh(self, found: Tensor, output: Any, targets: Any, samples: int, usual: int, slices: int) -> Counted:
        """Return a loss with its weight by the rule."""
        rule = self._weight or LossWeight(Over.SAMPLES)
        if rule.over is Over.SUM:
            return Counted(found, 0.0, is_sum=True)
        for even in self._evens:
            self._require_even(even, output, targets, samples)
        if rule.over in _BY_SAMPLES:
            share = samples / usual
            return _counted((found, share if rule.by_slices else share / slices, share, False))
        if rule.over is Over.TOKENS:
            share = float(self._weight_by(rule, output, targets, samples))
            return _counted((found, share, share, False))
        weight = self._weight_by(rule, output, targets, samples)
        if rule.is_clamped:
            weight = _clamped(torch.as_tensor(weight), found.detach())
        is_nothing = self._nothing[0] = (weight == 0) & found.detach().isnan()  # 0 / 0; others are reported
        wide = found.to(torch.promote_types(found.dtype, torch.float32))
        return Counted(torch.where(is_nothing, 0.0, wide * weight), weight)

    def _weight_by(self, rule: LossWeight, output: Any, targets: Any, samples: int) -> Tensor | float:
        """Return the weight of a microbatch by a rule for means not over samples."""
        if rule.over is Over.TOKENS:
            if isinstance(output, Tensor) and output.dim() > 1 and output.dtype in DIFFERENTIABLE:
                return float(samples * output.shape[1])
            lengths = [t.shape[1] for t in tensors_of(output) if t.dim() > 1 and t.dtype in DIFFERENTIABLE]
            return float(samples * lengths[0])
        return rule.of_targets(named(targets), self.examined[0].tables if self.examined else [])

    def _require_even(self, even: EvenWeights, output: Any, targets: Any, samples: int) -> None:
        """Record a microbatch whose samples weigh differently from others; all ranks refuse it before a step."""
        if self.is_alone:
            return
        why = even.doubt(self._weight_by(even.rule, output, targets, samples), samples)
        self._refusal = self._refusal or why
        self.is_uneven = self.is_uneven or bool(why)


def note_misuse(error: MisfitError, misuses: list[str] | None) -> None:
    """Record why a rank refuses a result, or raise the error where nothing is recorded."""
    if misuses is None:
        raise error
    misuses.append(str(error))


def _without_leaves(output: Any) -> Any:
    """Return an output with views in place of leaves, as hooks on a leaf (a weight) would outlive the microbatch."""
    if isinstance(output, Tensor) and not output.is_leaf:
        return output
    are_any = any(tensor.requires_grad and tensor.is_leaf for tensor in tensors_of(output))
    own = lambda tensor: tensor.view_as(tensor) if tensor.requires_grad and tensor.is_leaf else tensor  # noqa: E731
    return map_tensors(own, output) if are_any else output


def _stated(found: object) -> Counted:
    """Return the sum and the weight that a loss function returned; raises `MisfitError` for anything else."""
    loss, weight = found if isinstance(found, tuple) and len(found) == 2 else (found, 0)
    is_weight = (isinstance(weight, Tensor) and not weight.dim()) or isinstance(weight, Real)
    if loss is found or not isinstance(loss, Tensor) or loss.dim() or loss.is_complex() or not is_weight:
        named = str(TensorSpec.from_tensor(found)) if isinstance(found, Tensor) else f"a {type(found).__name__}"
        named += "" if is_weight else f" whose second thing, a {type(weight).__name__}, is no weight"
        raise MisfitError(
            f"the loss function must give a real tensor of no dimensions, or (sum, weight); it gave {named}"
        )
    return Counted(loss, weight.detach() if isinstance(weight, Tensor) else float(weight))


def _clamped(weight: Tensor, found: Tensor) -> Tensor:
    """Return the weight of a microbatch; an empty one gets one that is negligible unless all are empty."""
    return torch.where((weight == 0) & found.isfinite(), _NEXT_TO_NOTHING, weight.double())
