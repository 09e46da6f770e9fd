"""Reductions of losses that blocks return, found by experiment: sums over samples, or means over them.

    x = a ⊕ b, unlike parts of some samples; s: the share of a; ∂ by the block's inputs, and by its weights

    L(x) = L(a) + L(b)                ∂L(x) = ∂L(a) + ∂L(b)                a sum
    L(x) = s L(a) + (1 - s) L(b)      ∂L(x) = s ∂L(a) + (1 - s) ∂L(b)      a mean over samples, or targets that count

Inputs are drawn in several scales, one sample far from the others. Weights are drawn too, as a router of zeros decides
nothing. Extras and targets are varied, since later ones may change the loss. Norms use their running statistics on
these few samples, and the balance loss of `MoE` is left out, which belongs to a microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..blocks.block_builders import TARGETS, accepted_extras
from ..blocks.dtensor import is_sharded
from ..blocks.without_side_effects import StateCopy, untouched
from ..losses.experiments.altered_targets import with_other_targets
from ..losses.experiments.find_loss_reduction import LossExamination
from ..losses.experiments.loss_parts import LossParts, rows_of_each
from ..losses.loss_reductions import LossWeight, Over
from ..losses.save_and_restore_loss_state import versions_kept
from ..parallel.cut_proofs.block_twins import draw_weight
from ..parallel.cut_proofs.trial_inputs import Arrival, TrialInput
from ..parallel.expert.moe import mixtures
from ..step_setup.block_examination_results import BlockLoss
from ..user_objects.control_flow_state import SteeringState
from ..user_objects.find_impure_code import asking_elsewhere
from .altered_extra_inputs import Agree, others_of
from .trial_block_runs import TriedBlock

DRAWN_SAMPLES = 13
"""Number of samples drawn, where memory allows it: a number of rows that few other sizes are multiples of."""

_SIZES = (
    ((4, 1.0, 1.0), (4, 0.1, 1.0)),
    ((1, 1.0, 1.0), (6, 1.0, 10.0)),
    ((4, 100.0, 1.0), (9, 1.0, 0.01)),
    ((1, 10.0, 1.0), (5, 3.0, 1.0)),
)
"""Experiments by draw: size of the first part, scale of its numbers, scale of the rest's."""

_FAR = 30.0
_TOLERANCE = {8: 1e-7, 4: 2e-4}
_NOISE = 1e-3
"""Size, relative to the largest gradient, below which a gradient may be rounding error only."""

_UNTRIED = "it cannot be run on several samples of numbers that are drawn, and on some of them"


class _Tried(NamedTuple):
    """Loss, 0-dimensional, and its gradients: of the block's inputs, then of its weights."""

    value: Tensor
    gradients: Sequence[Tensor]


def examine_block_loss(
    tried: TriedBlock,
    arrival: Arrival,
    samples: int,
    *,
    agree: Agree = list,
    is_brief: bool = False,
    records: bool = True,
) -> BlockLoss:
    """Return the reductions that the loss of a block may have, in its present mode; the block is restored.

    Args:
        tried: the block; it draws the same each time for these samples.
        arrival: its inputs, of as many `samples`.
        agree: makes numbers equal on the ranks that run the block together.
        is_brief: whether one experiment is enough, as it was examined before.
        records: whether it runs with an autograd graph; without one its values decide.
    """
    unseen = SteeringState({f"block {tried.number}": tried.block}).unseen
    asked = list[str]()
    with versions_kept(tried.block), untouched(tried.block):
        _leave_batches_out(tried.block)
        found = _Examination(tried, arrival, samples, agree, asked, records).examine_losses(is_brief)
        if not found.over and not found.why:  # for blocks that draw per microbatch, not per sample
            by_unit = tried._replace(alike=lambda some: tried.alike(range(len(some))))
            found = _Examination(by_unit, arrival, samples, agree, asked, records).examine_losses(is_brief)
    elsewhere = f"it asks {asked[0]}" if asked else unseen and f"it goes by {unseen!r}, which nobody can compare"
    return found._replace(over=(), why=f"{elsewhere}, and may be another then") if elsewhere else found


def _leave_batches_out(block: nn.Module) -> None:
    for module in block.modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            module.training = False
    for layer in mixtures(block).values():
        layer.balance, layer.z, layer.capacity_factor = 0.0, layer.balance + layer.z, None


class _Examination:
    """Experiments on a block; calls that are not plain are added to `asked`."""

    def __init__(
        self, tried: TriedBlock, arrival: Arrival, samples: int, agree: Agree, asked: list[str], records: bool
    ) -> None:
        self._tried, self._block, self._agree, block = tried, tried.block, agree, tried.block
        self._asked, self._kept, self._records = asked, StateCopy(block), records
        accepts = accepted_extras(block)
        extras = {name: extra for name, extra in arrival.extras.items() if accepts(name)}
        self._arrival, targets = replace(arrival, extras=extras), extras.get(TARGETS)
        self._samples, self._names = samples, [*(name for name in extras if name != TARGETS), TARGETS]
        self._known = (
            LossExamination(block, [], targets.build(lambda part: part.tensor), samples)
            if targets is not None
            else None
        )
        self._is_alone = not is_sharded(block) and all(layer.group.size == 1 for layer in mixtures(block).values())
        self._num_leaves = len(arrival.tensors)

    def examine_losses(self, is_brief: bool) -> BlockLoss:
        """Return the finding that all experiments agree on; if it `is_brief`, of the first with drawn weights."""
        of, parts = (self._tried.number, type(self._block).__name__), self._drawn(0, self._arrival)
        candidates: dict[LossWeight, None] = dict.fromkeys([LossWeight(Over.SUM), LossWeight(Over.SAMPLES)])
        if self._known is not None:
            of_targets = self._known.weights_of_targets(parts)
            candidates |= dict.fromkeys(w for w in of_targets if w.over in (Over.TARGETS, Over.NUMBERS))
        has_run = False
        for some in islice(self._experiments(1), 1) if is_brief else self._experiments():
            (one, other), both = some.halves(), some.first + some.rest
            whole = self._try_once(some.outputs, some.targets, range(both))
            a = self._try_once(*one, range(some.first))
            b = self._try_once(*other, range(some.first, both))
            if whole is not None and a is not None and b is not None:
                has_run = True
                if self._goes_by_rest(some, whole):
                    return BlockLoss(*of, (), "it goes by what it is given that belongs to no sample")
                candidates = {w: None for w in candidates if self._holds(self._shares(w, some), some, (whole, a, b))}
                if not candidates:
                    return BlockLoss(*of, (), where=some.words)
        return BlockLoss(*of, tuple(candidates)) if has_run else BlockLoss(*of, (), _UNTRIED)

    def _experiments(self, begin: int = 0) -> Iterator[LossParts]:
        for number, sizes in enumerate(_SIZES[begin:], begin):
            parts, count = self._drawn(number, self._arrival), self._samples
            if number and not is_sharded(self._block):
                self._draw_weights(number)
            for cut, first, rest in sizes:
                size = min(max(1, round(cut * count / DRAWN_SAMPLES)), count - 1)
                yield replace(parts, first=size, rest=count - size).scaled(first, rest)
            if self._is_alone and not number and self._known is not None:
                yield from with_other_targets(parts, self._known.ids, is_safe=parts.outputs[0].device.type == "cpu")
        given = others_of(self._arrival, self._block, self._agree)
        for other, words in islice(given, None if self._is_alone else 1):  # ranks of other data may fail alone
            yield replace(self._drawn(len(_SIZES), other).scaled(1, 0.1), words=f", {words}")

    def _drawn(self, number: int, arrival: Arrival) -> LossParts:
        """Return samples of the `number`-th draw, with the extras and targets of an arrival.

        Drawn ids are at most as large as those in the arrival.
        """
        generator = torch.Generator().manual_seed(number)
        outputs = [self._other(given.tensor, number, generator) for given in self._arrival.tensors.values()]
        beside = [[p.tensor for p in arrival.extras[name].parts] for name in self._names if name in arrival.extras]
        targets = beside.pop() if TARGETS in arrival.extras else []
        outputs += [extra for tree in beside for extra in tree]
        units = [rows_of_each(leaf, self._samples) for leaf in (*outputs, *targets)]
        first = max(1, self._samples // 3)
        return LossParts(outputs, targets, first, self._samples - first, 0, units)

    def _other(self, like: Tensor, number: int, generator: torch.Generator) -> Tensor:
        if like.is_floating_point():
            each = (self._samples, *[1] * (like.dim() - 1)) if like.dim() else ()
            drawn = torch.randn(like.shape, generator=generator, dtype=like.dtype)
            if rows_of_each(like, self._samples) == 1:
                scales = 0.5 + torch.rand(each, generator=generator, dtype=like.dtype)
                scales[0] *= _FAR if number % 2 else 1
                drawn = scales * (drawn + torch.randn(each, generator=generator, dtype=like.dtype) / 2)
            return drawn.to(like.device)
        is_plain = number and like.numel() and not like.dtype.is_complex and like.dtype is not torch.bool
        if not is_plain or int(like.min()) < 0:
            return like
        return torch.randint(0, int(like.max()) + 1, like.shape, generator=generator).to(like.device, like.dtype)

    def _draw_weights(self, number: int) -> None:
        for name, weight in self._block.named_parameters():
            generator = torch.Generator(weight.device).manual_seed(number)
            with torch.no_grad():
                weight.copy_(draw_weight(name, weight, weight.device, generator))
        self._kept = StateCopy(self._block)

    def _try_once(self, outputs: Sequence[Tensor], targets: Sequence[Tensor], samples: range) -> _Tried | None:
        """Return the loss of these tensors; None where it is not finite, or the block cannot be run on them."""
        asked = list[str]()
        try:
            at_first = untouched(self._block, self._kept)
            with at_first, self._tried.alike(samples), asking_elsewhere(clocks=False) as asked:
                given, records = self._arrival_of(outputs, targets), self._records
                ran = self._tried.run_with_graph(given, records=records)
                wanted = [*ran.leaves, *ran.weights] if records else []
                loss = torch.zeros(()) if ran.loss is None else ran.loss
                found = (
                    torch.autograd.grad(loss, wanted, allow_unused=True) if loss.requires_grad else [None] * len(wanted)
                )
        except Exception:  # errors of user code on numbers that no block has given
            return None
        finally:
            self._asked += asked
        gradients = [torch.zeros_like(t) if g is None else g.detach() for g, t in zip(found, wanted, strict=True)]
        is_finite = all(bool(t.isfinite().all()) for t in (loss, *gradients))
        return _Tried(loss.detach(), gradients) if is_finite else None

    def _arrival_of(self, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Arrival:
        """Return an arrival of these tensors."""
        tensors, given = iter([*outputs, *targets]), self._arrival

        def take(some: Iterable[TrialInput]) -> list[TrialInput]:
            return [TrialInput(next(tensors), one.tokens) for one in some]

        activation = replace(given.activation, parts=take(given.activation.parts))
        riders = dict(zip(given.riders, take(given.riders.values()), strict=True))
        named = {name: given.extras[name] for name in self._names if name in given.extras}
        extras = {name: replace(tree, parts=take(tree.parts)) for name, tree in named.items()}
        return replace(given, activation=activation, riders=riders, extras=extras)

    def _goes_by_rest(self, parts: LossParts, tried: _Tried) -> bool:
        """Return whether a loss has a gradient of inputs that belong to no sample."""
        units = [parts.units[i] for i in range(self._num_leaves) if parts.outputs[i].is_floating_point()]
        return any(not unit and bool(g.any()) for unit, g in zip(units, tried.gradients, strict=False))

    def _shares(self, weight: LossWeight, parts: LossParts) -> tuple[float, float] | None:
        """Return the share of each part in the whole by a weight; None: it is undefined."""
        if weight.over is Over.SUM:
            return 1.0, 1.0
        share = parts.share
        if weight.over is not Over.SAMPLES:
            assert self._known is not None
            of_targets = self._known.share_of(weight, parts)
            if of_targets is None:
                return None
            share = of_targets
        return share, 1 - share

    def _holds(
        self, shares: tuple[float, float] | None, parts: LossParts, tried: tuple[_Tried, _Tried, _Tried]
    ) -> bool:
        """Return whether a loss of two parts is the sum of those of each, times their shares."""
        if shares is None:
            return False
        whole, a, b = tried
        of_a, of_b = shares
        units = [parts.units[i] for i in range(self._num_leaves) if parts.outputs[i].is_floating_point()]
        units = [*units, *[0] * (len(whole.gradients) - len(units))] if whole.gradients else []
        gradients = list[tuple[Tensor, Tensor, Tensor]]()
        for unit, both, one, other in zip(units, whole.gradients, a.gradients, b.gradients, strict=True):
            if unit:
                mine, its = both.split([parts.first * unit, parts.rest * unit])
                gradients += [(mine, of_a * one, torch.zeros_like(mine)), (its, of_b * other, torch.zeros_like(its))]
            else:
                gradients.append((both, of_a * one, of_b * other))
        size = min((t.dtype.itemsize for t in (whole.value, *whole.gradients)), default=4)
        least = _TOLERANCE.get(size, 4e-2)
        largest = max((_norm(both) for both, *_ in gradients), default=0.0)
        values = [(whole.value, of_a * a.value, of_b * b.value)]
        return _are_close(values, least, 1e-30) and _are_close(gradients, least, least * _NOISE * largest + 1e-30)


def _are_close(pairs: Sequence[tuple[Tensor, Tensor, Tensor]], least: float, floor: float) -> bool:
    return all(
        _norm(both.double() - one - other) <= least * (_norm(both) + _norm(one) + _norm(other)) + floor
        for both, one, other in pairs
    )


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())
