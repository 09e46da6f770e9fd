"""Examination of a loss: its reduction, a sum or a mean over samples, tokens, targets or class weights, by experiment.

    o = a ⊕ b, two unlike parts (`loss_parts`); values, and gradients with respect to the outputs

    ∂L(o)/∂a = r_a ∂L(a)/∂a       r_a = r_b = 1, L(o) = L(a) + L(b)                    a sum
    ∂L(o)/∂b = r_b ∂L(b)/∂b       r_a + r_b = 1, L(o) = r_a L(a) + r_b L(b)            a mean, by weights as r_a : r_b
                                  anything else, or weights that are not known here    refused: no weights of
                                                                                       microbatches make it the batch's

A weight has to fit in every experiment. So contrastive losses, norms, maxima, quantiles, and sums of means over
different units are refused, and losses with an `ignore_index` are detected before any target is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...blocks.trees import flatten
from ..loss_reductions import WITHOUT_GRADIENT, LossWeight, Over, WeightFinding
from ..save_and_restore_loss_state import FunctionKept, FunctionState, class_weights, whole_numbers
from .altered_targets import with_ignored_tokens, with_other_targets
from .find_losses_with_state import depends_on_calls, goes_by_written
from .loss_parts import LossParts, Rows, along_samples, along_tokens, cut_elsewhere, leaf_rows, ratio_of, shortened
from .losses_mixing_tokens import OF_SLICES, mixes_tokens
from .nonlinear_losses import CHANGES_GRADIENTS, FACTORS, gradients_of, is_linear
from .trial_call_modes import CallsChecked, MadeUp, unseen

Loss = Callable[[Any, Any], Any]


Candidates = dict[LossWeight, Callable[[LossParts], float | None]]
"""Candidate weights that fit so far; each with a function that returns the first part's share by it."""


class Tried(NamedTuple):
    """Result of a loss on a batch or part: its value, the gradients of the output's leaves, the weight it returns.

    `dtype` is the lowest precision that it was computed in.
    """

    value: Tensor
    gradients: Sequence[Tensor | None]
    weight: float | None = None
    dtype: torch.dtype = torch.float64


class Share(NamedTuple):
    """Result of an experiment: the first part's share in a mean, None for a sum; `is_told`: whether it decides.

    Where the loss of one part is empty (`is_empty`), a sum is a mean of the other as well.
    """

    first: float | None = None
    is_empty: tuple[bool, bool] = (False, False)
    tolerance: float = 0.0
    why: str = ""
    is_told: bool = True


OF_OTHER_WEIGHTS = (
    "it is a mean, but neither over samples, tokens or targets, nor by weights of classes that it holds (an attribute,"
    " an argument or a global, not made in each call)"
)
WRITES = "its calls write {}, which it goes by: once for each microbatch, and not once for a batch"
NO_SAMPLE = (
    "; output{} belongs to no sample, and so is in each microbatch: add what the loss takes of it to a mean, or to "
    "(sum, weight) as often as there are samples"
)
_UNTOLD = Share(is_told=False)
_PRECISION = {torch.float64: (1e-9, 1e-13), torch.float32: (2e-5, 1e-6), torch.bfloat16: (2e-2, 5e-3)}
"""Tolerances of a row of gradients: relative to the row, and to all rows."""


class LossExamination:
    """Experiments on one function of outputs and targets, whose state is restored afterwards.

    Args:
        loss: (output, targets) → a loss.
        output, targets: of a microbatch of so many samples.
        sliced: whether sequences are cut, so that the reduction has to hold along tokens as well.
        apart: paths of output tensors that belong to no sample, whatever their rows.
    """

    called = "the loss"

    def __init__(
        self,
        loss: Loss,
        output: Any,
        targets: Any,
        samples: int,
        *,
        sliced: bool = False,
        apart: Collection[str] = (),
    ) -> None:
        self._loss, self.is_sliced = loss, sliced
        self._output_tree, outputs = flatten(output)
        self._target_tree, given = flatten(targets)
        self._paths = self._target_tree.paths
        self._device = outputs[0].device if outputs else torch.device("cpu")
        self.kept = FunctionKept(loss, self._device)
        self._tables = class_weights(loss)
        self._leaves, self._samples = ([t.detach() for t in outputs], given), samples
        self._apart = apart
        self.ids = list(dict.fromkeys([-100, -1, *whole_numbers(loss)]))
        self.is_safe = True
        self._usual: float | None = None
        self._is_linear, self._factors = True, cycle(FACTORS)
        self._of_rest = ""

    def examine_loss(self) -> WeightFinding:
        """Return the finding that all experiments agree on."""
        finding = self._agreed()
        why = "" if finding.weight is None else self.why_unlinear(finding.weight)
        if self.is_sliced and finding.weight is not None and mixes_tokens(self):
            why = OF_SLICES
        return WeightFinding(None, why) if why else finding

    def why_unlinear(self, weight: LossWeight) -> str:
        """Return the reason why gradients are not proportional to the loss's, by all calls so far; "": they are.

        For a sum it does not matter: its gradients are added up unscaled.
        """
        return "" if self._is_linear or weight.over is Over.SUM else CHANGES_GRADIENTS

    def _agreed(self) -> WeightFinding:
        if not self.has_rows():
            return WeightFinding(None, "its output has no rows of samples")
        parts = self.usable()
        if parts is None:
            return WeightFinding(None, "it cannot be called with some of the samples")
        candidates = dict(self.candidates(parts))
        told: list[Share] = []
        others = list(with_other_targets(parts, self.ids, is_safe=self.is_safe, tables=self._tables))
        if name := self.depends_on_calls(parts):
            return WeightFinding(None, WRITES.format(name))
        made = (parts.with_hits(), cut_elsewhere(parts), *parts.with_other_rest())
        for some in (*parts.of_all_sizes(), *parts.with_one_far(), *made, *others, *parts.on_other_side()):
            share = self.share(some)
            if share.why and not some.is_odd:
                return WeightFinding(None, share.why + some.words)
            fitting = {w: of for w, of in candidates.items() if share.is_told and _fits(of(some), share)}
            if share.is_told and not (some.is_odd and (share.why or not fitting)):
                told.append(share)
                candidates = fitting
        told = [share for share in told if not any(share.is_empty)]
        if not told:
            return self._without_gradient(parts)
        if len({share.first is None for share in told}) > 1:
            return WeightFinding(None, "it is a sum of some targets, and a mean of others")
        if told[0].first is None:
            return self._along_tokens(parts, LossWeight(Over.SUM), candidates)
        if not candidates:
            return WeightFinding(None, OF_OTHER_WEIGHTS)
        weight = self.chosen(candidates)
        finding = self._along_tokens(parts, weight, candidates)
        return WeightFinding(self._as_of_nothing(parts, finding.weight)) if finding.weight is not None else finding

    def has_rows(self) -> bool:
        """Return whether the output has rows of samples."""
        rows = zip(self._rows_of(*self._leaves), self._leaves[0], strict=False)
        return any(n for n, leaf in rows if leaf.is_floating_point())

    def _rows_of(self, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[int]:
        """Return the number of rows per sample, of each leaf."""
        of_outputs = leaf_rows(self._output_tree, outputs, self._samples, self._apart)
        return of_outputs + leaf_rows(self._target_tree, targets, self._samples)

    def chosen(self, candidates: Candidates) -> LossWeight:
        """Return one of the weights that fit; where ids could not be tried, the one that allows ignored targets."""
        first = next(iter(candidates))
        may_ignore = (w for w in candidates if w.over is Over.TARGETS and w.ignored == -100)
        return first if self.is_safe else next(may_ignore, first)

    def _along_tokens(self, parts: LossParts, weight: LossWeight, candidates: Candidates) -> WeightFinding:
        """Return the weight that also holds for slices of sequences, and for samples of other lengths."""
        cut_parts = along_tokens(parts)
        tried = with_ignored_tokens(cut_parts, [weight.ignored], is_safe=self.is_safe) if cut_parts is not None else ()
        cuts = [(cut, self.share(cut)) for cut in tried]
        told = [(cut, share) for cut, share in cuts if share.is_told]
        if not told:
            return WeightFinding(weight)
        is_odd = any(share.why for _, share in told)
        if weight.over is Over.SUM:
            holds = not is_odd and all(share.first is None for _, share in told)
        elif weight.over is Over.SAMPLES:
            if not is_odd and all(share.first is None for _, share in told):
                return WeightFinding(LossWeight(Over.SAMPLES, by_slices=False))
            holds = not is_odd and all(share.first is not None and _fits(cut.share, share) for cut, share in told)
            weight = LossWeight(Over.TOKENS) if holds else weight
        else:
            means = ((candidates[weight](cut), share) for cut, share in told)
            holds = not is_odd and all(share.first is not None and _fits(its, share) for its, share in means)
        if self.is_sliced and not holds:
            return WeightFinding(None, OF_SLICES)
        return WeightFinding(weight)

    def _as_of_nothing(self, parts: LossParts, weight: LossWeight) -> LossWeight:
        """Return the weight with the behavior of the loss where all targets weigh nothing (nan, or clamped)."""
        if weight.over not in (Over.TARGETS, Over.NUMBERS, Over.CLASSES):
            return weight
        place, values = self._paths.index(weight.leaf), [0 if weight.over is Over.NUMBERS else weight.ignored]
        if weight.over is Over.CLASSES:
            values += (self._tables[weight.table] == 0).nonzero().flatten().tolist()[:1]
        for value in values:
            targets = list(parts.targets)
            targets[place] = MadeUp.from_leaf(torch.full_like(targets[place], value))
            tried = self.try_once(parts.outputs, targets, may_be_infinite=True)
            if tried is not None:
                fails = any(g is not None and not bool(g.isfinite().all()) for g in tried.gradients)
                is_clamped = weight.is_clamped or bool(tried.value.isfinite())
                weight = replace(weight, is_guarded=weight.is_guarded or fails, is_clamped=is_clamped)
        return weight

    def depends_on_calls(self, parts: Rows, state: FunctionState | None = None) -> str | None:
        """Return the name of the state that its own calls write and then read, since `state` was noted; None: none.

        Generators are restored.
        """
        others = [[t * 0.5 if t.is_floating_point() else t for t in parts.outputs], parts.outputs]
        given = [(some, parts.targets) for some in others]
        if isinstance(parts, LossParts):
            given.append(parts.halves()[1])
        calls = [partial(self._figures, *some) for some in given]
        state = state or FunctionState(self._loss, self.called)
        return depends_on_calls(state, self.kept, partial(self._figures, parts.outputs, parts.targets), calls * 2)

    def goes_by_written(self, state: FunctionState, names: Collection[str]) -> str | None:
        """Return the name of written state that it reads, of `names` written since `state` was noted; None: none."""
        if (parts := self.usable()) is None:
            return None
        return goes_by_written(state, self.kept, partial(self._figures, parts.outputs, parts.targets), names)

    def _figures(self, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        """Call it with its side effects, and return the numbers that it returns."""
        with torch.enable_grad(), unseen():  # a loss may call autograd itself
            found = self._loss(self._output_tree.build([*map(_leaf, outputs)]), self._target_tree.build(targets))
        return [torch.as_tensor(one).detach() for one in (found if isinstance(found, tuple) else (found,))]

    def _without_gradient(self, parts: LossParts) -> WeightFinding:
        whole = self.try_once(parts.outputs, parts.targets)
        if whole is not None and not any(g is not None and g.any() for g in whole.gradients):
            return WITHOUT_GRADIENT
        return WeightFinding(None, "of some of the samples it is not finite, or has no gradient")

    def usable(self, *, is_long: bool = False) -> LossParts | None:
        """Return the parts in the highest precision that the loss accepts, on the CPU if possible.

        Sequences of large outputs are shortened, to as many tokens as memory allows if they are to be `is_long`.
        """
        for leaves in (shortened(*self._leaves, self._samples, fills=is_long), self._leaves):
            parts = along_samples(*leaves, self._samples, self._rows_of(*leaves))
            for place, dtype in self.ways():
                made = replace(
                    parts,
                    outputs=[_moved(t, place, dtype) for t in parts.outputs],
                    targets=[_moved(t, place, dtype) for t in parts.targets],
                )
                if self.try_once(made.outputs, made.targets, may_be_infinite=True) is not None:
                    self.is_safe = place.type == "cpu"
                    return made
        return None

    def ways(self) -> Iterator[tuple[torch.device, torch.dtype | None]]:
        """Yield devices and dtypes to call the loss with: CPU and highest precision first."""
        is_bound = "vocabulary" in getattr(self._loss, "keywords", {})
        places = [self._device] if is_bound else list(dict.fromkeys([torch.device("cpu"), self._device]))
        yield from product(places, (torch.float64, torch.float32, None))

    def candidates(self, parts: LossParts) -> Iterator[tuple[LossWeight, Callable[[LossParts], float | None]]]:
        """Yield candidate weights, each with a function that returns the first part's share by it."""
        yield LossWeight(Over.SAMPLES), lambda parts: parts.share
        for weight in self.weights_of_targets(parts):
            yield weight, partial(self.share_of, weight)

    def weights_of_targets(self, parts: LossParts) -> Iterator[LossWeight]:
        """Yield the weights that targets may define."""
        tables = range(len(self._tables))
        units = parts.units[len(parts.outputs) :]
        for place, unit, leaf in zip(self._paths, units, parts.targets, strict=True):
            for shift in range(1 + (leaf.dim() > 1)) if unit else ():
                if leaf.is_floating_point() or leaf.dtype is torch.bool:
                    yield LossWeight(Over.NUMBERS, place, shift)
                    continue
                values = leaf.unique()[:64].tolist() if leaf.numel() < 1 << 20 else []
                for ignored in dict.fromkeys([*self.ids, *values]):
                    yield LossWeight(Over.TARGETS, place, shift, ignored)
                for table in tables:
                    for ignored in self.ids:
                        yield LossWeight(Over.CLASSES, place, shift, ignored, table)
                yield LossWeight(Over.NUMBERS, place, shift)  # e.g. lengths

    def share_of(self, weight: LossWeight, parts: LossParts) -> float | None:
        """Return the first part's share by the weights of targets; None: it cannot be computed."""
        try:
            (_, a), (_, b) = parts.halves()
            named = (dict(zip(self._paths, part, strict=True)) for part in (a, b))
            return _quotient(*(float(weight.of_targets(part, self._tables)) for part in named))
        except (IndexError, RuntimeError):  # ids without a class weight
            return None

    def share(self, parts: LossParts) -> Share:
        """Return the first part's share in the loss of both parts, as measured against the losses of each."""
        one, other = parts.halves()
        whole, a, b = self.try_once(parts.outputs, parts.targets), self.try_once(*one), self.try_once(*other)
        if whole is None or a is None or b is None:
            return _UNTOLD
        tolerance, (residue, least) = self.tolerance(whole), _PRECISION.get(whole.dtype, _PRECISION[torch.bfloat16])
        of_a, of_b = [], []
        for number, gradient in enumerate(whole.gradients):
            if gradient is not None and parts.units[number]:
                mine, its = parts.cut(number, gradient)
                of_a.append((mine, a.gradients[number]))
                of_b.append((its, b.gradients[number]))
        if self._usual is None:
            self._usual = sum(float(g.double().norm()) for g in whole.gradients if g is not None)
        ratios = [ratio_of(pairs, residue, least, self._usual) for pairs in (of_a, of_b)]
        if "unlike" in ratios:
            return Share(why="its gradient for one sample depends on the other samples of the batch")
        r_a, r_b = (None if r == "none" else float(r) for r in ratios)
        if r_a is None and r_b is None:
            return _UNTOLD
        value, of_one, of_other = (float(t.value) for t in (whole, a, b))
        least = tolerance * 4 * (abs(of_one) + abs(of_other) + abs(value) + 1e-9)
        is_empty = ratios[0] == "none" and not a.value, ratios[1] == "none" and not b.value
        is_sum = all(r is None or abs(r - 1) < tolerance for r in (r_a, r_b)) and abs(value - of_one - of_other) < least
        if is_sum and not any(is_empty):
            return Share(None)
        r_a, r_b = (
            (1 - r_b if r_a is None and r_b is not None else r_a),
            (1 - r_a if r_b is None and r_a is not None else r_b),
        )
        assert r_a is not None
        assert r_b is not None
        if abs(r_a + r_b - 1) > tolerance * 4 or abs(value - r_a * of_one - r_b * of_other) > least:
            self._of_rest = self._rest_in(parts, whole)
            why = "of two batches together it is neither the sum nor a mean of what it is of each"
            return Share(why=why + self._of_rest)
        return Share(r_a, is_empty, tolerance * 4)

    def _rest_in(self, parts: LossParts, tried: Tried) -> str:
        """Return a hint for a loss that reads output tensors of no sample; "": it reads none."""
        pairs = zip(self._output_tree.paths, parts.units, tried.gradients, strict=False)
        path = next((path for path, unit, g in pairs if not unit and g is not None and g.any()), None)
        return "" if path is None else NO_SAMPLE.format(path)

    def tolerance(self, tried: Tried) -> float:
        """Return the relative tolerance of gradients, by dtype."""
        return {torch.float64: 1e-6, torch.float32: 2e-5}.get(tried.dtype, 5e-3)

    def call(self, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Any:
        """Call the function on the leaves of an output and of targets."""
        return self._loss(self._output_tree.build(outputs), self._target_tree.build(targets))

    def try_once(
        self, outputs: Sequence[Tensor], targets: Sequence[Tensor], *, may_be_infinite: bool = False
    ) -> Tried | None:
        """Return the result of the loss on these leaves; None where it is not finite, or the call fails."""
        leaves = [_leaf(t) for t in outputs]
        wanted = [t for t in leaves if t.requires_grad]
        try:
            with torch.enable_grad(), unseen():
                with CallsChecked() as checked:
                    value = self.call(leaves, targets)
                    if not isinstance(value, Tensor) or value.dim():
                        return None
                found = gradients_of(value, wanted) if value.requires_grad else ()
                self._is_linear = self._is_linear and is_linear(value, wanted, found, next(self._factors))
        except Exception:  # errors of user code on batches that it never gets
            return None
        finally:
            self.kept.put_back()
        by_leaf = iter(found or [None] * len(wanted))
        gradients = [next(by_leaf) if t.requires_grad else None for t in leaves]
        finite = all(g is None or bool(g.isfinite().all()) for g in gradients) and bool(value.isfinite())
        return Tried(value.detach(), gradients, dtype=checked.dtype) if finite or may_be_infinite else None


def _fits(share: float | None, seen: Share) -> bool:
    """Return whether a weight gives the first part the share that was measured; true for a sum."""
    return seen.first is None or (share is not None and abs(share - seen.first) <= seen.tolerance)


def _quotient(first: float, rest: float) -> float | None:
    return first / (first + rest) if first + rest else None


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_() if tensor.is_floating_point() else tensor


def _moved(leaf: Tensor, place: torch.device, dtype: torch.dtype | None) -> Tensor:
    return leaf.to(place, dtype if leaf.is_floating_point() else None)
