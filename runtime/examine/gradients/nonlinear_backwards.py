"""Blocks whose backward is not linear in the gradient: right for a whole batch, it is wrong for its microbatches.

    gradients in flight belong to one microbatch, times the weight of its loss; the total divides their sums

    g * mask, -g, straight-through              linear                 as in one process
    x.register_hook(lambda g: g.clamp(…))       clamps, clips, signs   another threshold for each way to cut a batch
    backward: return g, torch.ones(())          adds a constant        right where each microbatch weighs 1
    backward: return g.clamp(…)                 for each sample alone  right where the loss is a sum
    backward: return g - g.mean(0), g * len(g)  mixes samples          those of a microbatch, and not of the batch
    forward: self.kept = x; backward: … kept    a later forward's      if it has run before the backward
    backward: self.seen = g; forward: … seen    scaled by that weight  by which nothing divides it
    p.grad.mul_(0.5), of a sum so far           earlier ones again     once for each microbatch

Suspects (`custom_backwards`) are run on a few samples before the first step, with backwards from gradients of several
scales, and of single samples; again after state that they read has changed. Hooks on weights count as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...blocks.block_builders import accepted_extras
from ...blocks.dtensor import is_sharded
from ...blocks.without_side_effects import StateCopy, untouched
from ...guards.custom_backwards import Calls, Code, HooksAndModules, Watched, hooks_of
from ...parallel.cut_proofs.block_kinds import content_of
from ...parallel.cut_proofs.trial_inputs import Arrival
from ...step_setup.block_examination_results import GatheredWeights, Unlinear
from ...user_objects.find_impure_code import asking_elsewhere
from ...user_objects.snapshot import Snapshot
from ..altered_extra_inputs import Agree, others_of
from ..trial_block_runs import TriedBlock
from .microbatch_gradients import why_of_microbatch, why_of_others
from .trial_backwards import MOST_ASKED, Begin, Draws, OtherAnswers, TrialGradients, answered, gradients_of, made_behind

_SCALES, _SHORT_SCALES = (2.0**-10, 2.0**10), (2.0**-4, 2.0**4)
_TINY = 2.0**-60
_DRAWS = 4
"""Number of draws of gradients."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}

_FROZEN = 4096
"""Size limit, in elements, of frozen weights that are compared; blocks with larger ones are examined one by one."""
_ALWAYS = 8
"""Number of changes of a block that is no suspect that are all examined; then every power of two."""
_STEERED = (
    "{} may change gradients, and goes by {}, which may be another in a later step (let the training loop "
    "set an attribute of it)"
)

ArrivalOf = Callable[[int, bool], Arrival]
"""Function (block number, few samples?) → inputs of the block: `FEW` samples, or as many as cost least."""


_SEES = (
    "{} goes in its forward by gradients that its backward, or a hook, has seen (let a hook of the "
    "optimizer's step look at p.grad)"
)
_COUNTS = "{} divides gradients by how often ids are in a batch, scale_grad_by_freq=True"


def why_unlinear(tried: TriedBlock, arrival: Arrival, *, is_brief: bool = False) -> Unlinear:
    """Return the reason why a block's gradients are not proportional to its output gradients; its state is restored.

    If it `is_brief`, few experiments are enough; then the block's own errors are raised, and `ArithmeticError` for
    gradients that are not finite.
    """
    block = tried.block
    is_short = any(p.dtype is torch.float16 for p in block.parameters())
    scales = _SHORT_SCALES if is_short else _SCALES
    hooks, kept = Snapshot({f"hook {k}": hook for k, hook in enumerate(hooks_of(block))}), StateCopy(block)

    def backward(seed: int, scale: float, only: int | None = None) -> TrialGradients:
        for rest in (0.0, _TINY):  # tiny in place of zero: a block may divide 0 / 0
            with tried.alike(range(arrival.samples)):
                found = gradients_of(tried, arrival, Begin(seed, scale, only, rest), kept)
            if all(bool(gradient.isfinite().all()) for gradient in found):
                return found
        if is_brief:
            raise ArithmeticError
        return found

    try:
        with asking_elsewhere(clocks=False) as asked:
            none = backward(0, 0.0)
        others = [(scale, backward(0, scale)) for scale in scales]
        draws, samples = range(1 if is_brief else _DRAWS), range(arrival.samples)
        ones = [backward(seed, 1.0) for seed in draws]
        halves = [[backward(seed, 1.0, only=sample) for sample in samples] for seed in draws]
        sees = not is_brief and _sees_gradients(tried, arrival, scales, (hooks, kept))
    except Draws:
        return Unlinear(_STEERED.format(tried, "draws from Python's or numpy's generator"))
    except Exception as error:  # errors of user code on numbers that no block has given
        if is_brief:
            raise
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        return Unlinear(f"{tried} may change gradients, and fails where it is tried, {said}")
    finally:
        hooks.put_back()

    if asked:
        return Unlinear(_STEERED.format(tried, asked[0]))
    if sees:
        return Unlinear(_SEES.format(tried))
    return _judged(str(tried), none, others, ones, halves)


def _sees_gradients(
    tried: TriedBlock, arrival: Arrival, scales: Sequence[float], before: tuple[Snapshot, StateCopy]
) -> bool:
    """Return whether a block's output changes after a backward from larger gradients."""
    hooks, kept = before
    found = list[Sequence[Tensor]]()
    for scale in (1.0, *scales):
        hooks.put_back()
        found.append(made_behind(tried, arrival, Begin(0, scale), kept))
    pairs = (pair for its in found[1:] for pair in zip(its, found[0], strict=True))
    return not all(_is_close(now, one, torch.zeros_like(one), (1.0, one)) for now, one in pairs)


def _judged(
    said: str,
    none: TrialGradients,
    others: Sequence[tuple[float, TrialGradients]],
    ones: Sequence[TrialGradients],
    halves: Sequence[Sequence[TrialGradients]],
) -> Unlinear:
    """Return the verdict on gradients: from zero, by scales, of whole microbatches, and of single samples."""

    def adds_up(added: TrialGradients) -> bool:
        return all(_adds_up(one, parts, added) for one, parts in zip(ones, halves, strict=True))

    zeros = [torch.zeros_like(gradient) for gradient in none]
    is_of_each = adds_up(zeros)
    if is_of_each and _is_linear(none, ones[0], others, zeros):
        return Unlinear()
    adds = _is_linear(none, ones[0], others, none) and adds_up(none)
    what = "adds to gradients" if adds else "changes gradients by more than a factor, as a clamp does,"
    return Unlinear(f"{said} {what} in its backward, or by a hook", adds, is_of_each)


def _is_linear(
    none: TrialGradients, one: TrialGradients, others: Sequence[tuple[float, TrialGradients]], added: TrialGradients
) -> bool:
    """Return whether gradients are proportional to their output gradients, except for the constant `added`."""
    return all(
        _is_close(found - more, (whole - more) * scale, zero, (scale, whole))
        for scale, its in [*others, (0.0, none)]
        for zero, whole, found, more in zip(none, one, its, added, strict=True)
    )


def _adds_up(one: TrialGradients, halves: Sequence[TrialGradients], added: TrialGradients) -> bool:
    """Return whether gradients are the sums of those of single samples, except for the constant `added`."""
    return all(
        _is_close(sum(half - more for half in its), whole - more, more, (1.0, whole))
        for whole, more, *its in zip(one, added, *halves, strict=True)
    )


def _is_close(found: Tensor | int, wanted: Tensor, added: Tensor, sizes: tuple[float, Tensor]) -> bool:
    scale, whole = sizes
    size, of_added = float(whole.abs().amax()), float(added.abs().amax())
    least = _TOLERANCE.get(whole.dtype, 3e-2) * (scale * size + of_added) + 1e-12 * size
    return float((found - wanted).abs().amax()) <= least + 1e-30


def calls_own(tried: TriedBlock, arrival: Arrival) -> bool:
    """Return whether a block's forward applies a Function, or registers a hook, of no known library; it is restored."""
    calls = Calls()
    if any(isinstance(weight, DTensor) for weight in tried.block.parameters()):
        return False
    with suppress(Exception), untouched(tried.block):  # errors on numbers that no block has given
        with calls.watched():
            ran = tried.run_with_graph(arrival)
        calls.look_at(ran.made)
    return calls.has_own


class BlockBackwards:
    """Findings about the backwards of a rank's blocks.

    Args:
        blocks: by stage and number.
        tried: returns how a block of a number is tried.
        gathered: makes the weights of a stage resident (collective over replicas).
        agree: makes numbers equal on the ranks that run a block together.
        overtaken: the stages where a forward of another microbatch may run before a backward.
    """

    def __init__(
        self,
        blocks: Mapping[int, Mapping[int, nn.Module]],
        tried: Callable[[int, nn.Module], TriedBlock],
        gathered: GatheredWeights,
        agree: Agree = list,
        overtaken: Collection[int] = (),
    ) -> None:
        self._overtaken = {number for stage in overtaken for number in blocks.get(stage, ())}
        self._blocks, self._tried, self._gathered, self._agree = blocks, tried, gathered, agree
        self._arrival_of: ArrivalOf | None = None
        self._found: dict[int, Unlinear] = {}
        self._watched: dict[int, Watched] = {}
        self._suspects, self._owns = set[int](), False
        self._shape: HooksAndModules | None = None
        self._num_changes: dict[int, int] = {}

    @property
    def found(self) -> Unlinear:
        """First finding of a block whose backward is not linear."""
        return next((found for found in self._found.values() if found.why), Unlinear())

    @property
    def suspects(self) -> dict[int, nn.Module]:
        """Blocks that can change gradients, by number."""
        return {n: block for held in self._blocks.values() for n, block in held.items() if n in self._suspects}

    def changed(self) -> list[int]:
        """Return the numbers of the blocks whose backwards may have changed since they were examined.

        Called once in a step; blocks that are no suspects and change in each step are returned ever more rarely.
        """
        if not self._owns and (self._shape is None or self._shape.is_same()):
            return []
        found = [number for number, watched in self._watched.items() if watched.has_changed()]
        for number in found:
            self._num_changes[number] = self._num_changes.get(number, 0) + 1
        return [number for number in found if number in self._suspects or _is_due(self._num_changes[number])]

    def examine(self, arrival_of: ArrivalOf) -> None:
        """Find the blocks whose backward is not linear; see `again`."""
        self._arrival_of = arrival_of
        self.again({number for blocks in self._blocks.values() for number in blocks})

    def again(self, numbers: Collection[int]) -> None:
        """Examine the blocks of these numbers, of all ranks (collective over ranks with the same blocks)."""
        for stage, blocks in sorted(self._blocks.items()):
            some = {number: block for number, block in blocks.items() if number in numbers}
            if some and self._arrival_of is not None:
                known = dict[object, Unlinear]()
                with self._gathered(stage):
                    for number, block in some.items():
                        self._found[number] = self._examine(number, block, self._arrival_of, known)
        self._owns = any(watched.is_own for watched in self._watched.values())
        self._shape = HooksAndModules(block for blocks in self._blocks.values() for block in blocks.values())

    def _examine(self, number: int, block: nn.Module, arrival_of: ArrivalOf, known: dict[object, Unlinear]) -> Unlinear:
        """Return the finding about a block; `known`: the findings about others, by kind."""
        code = Code(block)
        is_suspect = code.is_suspect
        if code.has_more and not is_suspect:
            arrival = arrival_of(number, False)
            tried = self._tried(number, block)
            with tried.alike(range(arrival.samples)):
                is_suspect = calls_own(tried, arrival)
        kind: object = number
        if is_suspect and _is_of_kind(block, code):
            kind = _kind_of(block, arrival_of(number, True)), number in self._overtaken
        if kind not in known:
            known[kind] = self._find(self._tried(number, block), arrival_of, code, is_suspect=is_suspect)
        self._suspects = self._suspects | {number} if is_suspect else self._suspects - {number}
        self._watched[number] = Watched(block, code, is_suspect=is_suspect)
        return known[kind]

    def _find(self, tried: TriedBlock, arrival_of: ArrivalOf, code: Code, *, is_suspect: bool) -> Unlinear:
        """Return the finding of experiments on a block."""
        found = Unlinear()
        if is_suspect:
            arrival = arrival_of(tried.number, True)
            found = why_unlinear(tried, arrival)
            found = found if found.why else self._of_others(tried, arrival)
        is_taken = not found.why or found.adds or found.is_of_each
        if is_taken:
            found = self._of_microbatches(tried, arrival_of, code, found, is_suspect=is_suspect)
            is_taken = not found.why or found.adds or found.is_of_each
        if is_suspect and is_taken and (unknown := code.unknown()) is not None:
            found = Unlinear(_STEERED.format(tried, f"a {type(unknown).__name__}"))
        return found

    def _of_others(self, tried: TriedBlock, arrival: Arrival) -> Unlinear:
        """Return the finding for other numbers in extras, and for other values of tensors that it reads in Python."""
        block, accepts = tried.block, accepted_extras(tried.block)
        taken = replace(arrival, extras={name: extra for name, extra in arrival.extras.items() if accepts(name)})
        given = others_of(taken, block, self._agree) if taken.extras else ()
        for other, words in islice(given, 1 if is_sharded(block) else None):  # ranks of other data may fail alone
            if (found := _found_briefly(tried, other)).why:
                return found._replace(why=f"{found.why}, {words}")
        answers = OtherAnswers()
        with suppress(Exception), answered(tried.alike, answers)(range(arrival.samples)):
            gradients_of(tried, arrival, Begin(0, 1.0), StateCopy(block))
        for place in range(1, 1 + min(answers.count, MOST_ASKED) * (not is_sharded(block))):
            otherwise = tried._replace(alike=answered(tried.alike, OtherAnswers(place)))
            if (found := _found_briefly(otherwise, arrival)).why:
                return found._replace(why=f"{found.why}, where a tensor that it asks for its value has another")
        return Unlinear()

    def _of_microbatches(
        self, tried: TriedBlock, arrival_of: ArrivalOf, code: Code, found: Unlinear, *, is_suspect: bool
    ) -> Unlinear:
        """Return the reason why gradients depend on the microbatch, or else the former finding."""
        if any(getattr(module, "scale_grad_by_freq", False) is True for module in tried.block.modules()):
            return Unlinear(_COUNTS.format(tried))
        if not (is_suspect or code.may_detach):
            return found
        arrival = arrival_of(tried.number, True)
        why = "" if found.why else why_of_microbatch(tried, arrival)
        if is_suspect and not why:
            why = why_of_others(tried, arrival, overtaken=tried.number in self._overtaken)
        return Unlinear(why) if why else found


def _found_briefly(tried: TriedBlock, arrival: Arrival) -> Unlinear:
    """Return the finding for inputs that may never occur; a failure decides nothing."""
    with suppress(Exception):
        found = why_unlinear(tried, arrival, is_brief=True)
        return found if found.why else Unlinear(why_of_microbatch(tried, arrival))
    return Unlinear()


def _is_due(count: int) -> bool:
    return count <= _ALWAYS or not count & (count - 1)


def _is_of_kind(block: nn.Module, code: Code) -> bool:
    """Return whether all that a block's backward depends on is in `_kind_of`, or is trained."""
    weights = [*block.parameters()]
    is_plain = all(key.startswith("_quintsched") for weight in weights for key in vars(weight))
    is_small = all(weight.requires_grad or weight.numel() <= _FROZEN for weight in weights)
    return is_plain and is_small and not code.hooks and not is_sharded(block)


def _kind_of(block: nn.Module, arrival: Arrival) -> object:
    """Return a key that is equal for blocks that change gradients alike."""
    given = [(name, one.tensor.shape, one.tensor.dtype) for name, one in arrival.tensors.items()]
    frozen = [str(weight.tolist()) for weight in block.parameters() if not weight.requires_grad]
    return content_of(block), *given, *frozen
