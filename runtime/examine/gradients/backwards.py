"""Backwards of blocks that are not linear in the gradient: what is right for a batch is wrong for its microbatches.

    gradients in flight belong to one microbatch, times the weight of its loss; the total divides their sums

    g * mask, -g, straight-through              linear                 as in one process
    x.register_hook(lambda g: g.clamp(…))       clamps, clips, signs   another threshold for each way to cut a batch
    backward: return g, torch.ones(())          adds a constant        right where each microbatch weighs 1
    backward: return g.clamp(…)                 for each sample alone  right where the loss is a sum
    backward: return g - g.mean(0), g * len(g)  mixes samples          those of a microbatch, and not of the batch
    forward: self.kept = x; backward: … kept    a later forward's      where it has run before the backward
    backward: self.seen = g; forward: … seen    times that weight      of nothing that is taken back
    p.grad.mul_(0.5), of a sum so far           earlier ones again     once for each microbatch

Blocks that can do so (`own_backwards`) are run on a few samples before the first step, backwards from gradients of
several sizes, and of some samples alone; once more where what they go by has changed. Hooks on weights count as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...blocks.blocks import accepted_extras
from ...blocks.dtensor import is_sharded
from ...blocks.untouched import Kept, untouched
from ...objects.plain_code import asking_elsewhere
from ...objects.snapshot import Snapshot
from ...parallel.proof.arrivals import Arrival
from ...parallel.proof.kinds import content_of
from ..block_runs import RunBlock, run_with_graph
from ..other_numbers import Agree, others_of
from .microbatch_gradients import Alike, anyhow, why_of_microbatch, why_of_others
from .other_answers import MOST_ASKED, OtherAnswers, answered
from .own_backwards import Calls, Code, Shape, Watched, hooks_of
from .trial_backwards import Begin, Draws, Gradients, gradients_of, made_behind

_SCALES, _SHORT_SCALES = (2.0**-10, 2.0**10), (2.0**-4, 2.0**4)
_TINY = 2.0**-60
_DRAWS = 4
"""How often gradients are drawn."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}

_FROZEN = 4096
"""Larger weights that are not trained are not compared, nor blocks with such."""
_ALWAYS = 8
"""So many changes of a block that is no suspect are all looked at."""
_STEERED = (
    "block {} ({}) may change gradients, and goes by {}, which may be another in a later step (let the training loop "
    "set an attribute of it)"
)

Gathered = Callable[[int], AbstractContextManager[None]]
ArrivalOf = Callable[[int, bool], Arrival]
"""What a block of a number is given: of a few samples, or as many as cost least to find out."""


_SEES = (
    "block {} ({}) goes in its forward by gradients that its backward, or a hook, has seen (let a hook of the "
    "optimizer's step look at p.grad)"
)
_COUNTS = "block {} ({}) divides gradients by how often ids are in a batch, scale_grad_by_freq=True"


class Unlinear(NamedTuple):
    """Why the backward of a block is not linear, in words; "": it is.

    `adds`: but for what it adds to gradients. `is_of_each`: each sample has the gradient that it has alone.
    """

    why: str = ""
    adds: bool = False
    is_of_each: bool = False


def why_unlinear(
    run: RunBlock,
    number: int,
    block: nn.Module,
    arrival: Arrival,
    alike: Alike = anyhow,
    *,
    is_brief: bool = False,
) -> Unlinear:
    """Return why a block's gradients are not proportional to those that it is given; it is as it was.

    Args:
        run: runs a block on what it is given.
        number: of the block.
        block: its weights are resident.
        arrival: what it is given.
        alike: a context in which it draws the same each time for some samples.
        is_brief: whether few experiments are enough.

    Raises, if it `is_brief`, what the block raises, and `ArithmeticError` for gradients that are not finite.
    """
    is_short = any(p.dtype is torch.float16 for p in block.parameters())
    scales = _SHORT_SCALES if is_short else _SCALES
    hooks, kept = Snapshot({f"hook {k}": hook for k, hook in enumerate(hooks_of(block))}), Kept(block)

    def backward(seed: int, scale: float, only: int | None = None) -> Gradients:
        for rest in (0.0, _TINY):  # of nothing, 0 / 0
            with alike(range(arrival.samples)):
                found = gradients_of(run, number, block, arrival, Begin(seed, scale, only, rest), kept)
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
        sees = not is_brief and _sees_gradients(run, number, block, arrival, alike, scales, (hooks, kept))
    except Draws:
        return Unlinear(_STEERED.format(number, type(block).__name__, "draws from Python's or numpy's generator"))
    except Exception as error:  # what a user's code says to numbers that no block has given
        if is_brief:
            raise
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        return Unlinear(
            f"block {number} ({type(block).__name__}) may change gradients, and fails where it is tried, {said}"
        )
    finally:
        hooks.put_back()

    if asked:
        return Unlinear(_STEERED.format(number, type(block).__name__, asked[0]))
    if sees:
        return Unlinear(_SEES.format(number, type(block).__name__))
    return _judged(f"block {number} ({type(block).__name__})", none, others, ones, halves)


def _sees_gradients(
    run: RunBlock,
    number: int,
    block: nn.Module,
    arrival: Arrival,
    alike: Alike,
    scales: Sequence[float],
    before: tuple[Snapshot, Kept],
) -> bool:
    """Whether a block gives something else behind a backward from larger gradients."""
    hooks, kept = before
    found = list[Sequence[Tensor]]()
    for scale in (1.0, *scales):
        hooks.put_back()
        found.append(made_behind(run, number, block, arrival, Begin(0, scale), kept, alike))
    pairs = (pair for its in found[1:] for pair in zip(its, found[0], strict=True))
    return not all(_is_close(now, one, torch.zeros_like(one), (1.0, one)) for now, one in pairs)


def _judged(
    said: str,
    none: Gradients,
    others: Sequence[tuple[float, Gradients]],
    ones: Sequence[Gradients],
    halves: Sequence[Sequence[Gradients]],
) -> Unlinear:
    """Return what gradients show: of nothing, by scales, of whole microbatches, and of each of their samples alone."""

    def adds_up(added: Gradients) -> bool:
        return all(_adds_up(one, parts, added) for one, parts in zip(ones, halves, strict=True))

    zeros = [torch.zeros_like(gradient) for gradient in none]
    is_of_each = adds_up(zeros)
    if is_of_each and _is_linear(none, ones[0], others, zeros):
        return Unlinear()
    adds = _is_linear(none, ones[0], others, none) and adds_up(none)
    what = "adds to gradients" if adds else "changes gradients by more than a factor, as a clamp does,"
    return Unlinear(f"{said} {what} in its backward, or by a hook", adds, is_of_each)


def _is_linear(none: Gradients, one: Gradients, others: Sequence[tuple[float, Gradients]], added: Gradients) -> bool:
    """Whether gradients are proportional to what they come from, but for what is `added`."""
    return all(
        _is_close(found - more, (whole - more) * scale, zero, (scale, whole))
        for scale, its in [*others, (0.0, none)]
        for zero, whole, found, more in zip(none, one, its, added, strict=True)
    )


def _adds_up(one: Gradients, halves: Sequence[Gradients], added: Gradients) -> bool:
    """Whether gradients are the sums of those of some samples alone, but for what is `added`."""
    return all(
        _is_close(sum(half - more for half in its), whole - more, more, (1.0, whole))
        for whole, more, *its in zip(one, added, *halves, strict=True)
    )


def _is_close(found: Tensor | int, wanted: Tensor, added: Tensor, sizes: tuple[float, Tensor]) -> bool:
    scale, whole = sizes
    size, of_added = float(whole.abs().amax()), float(added.abs().amax())
    least = _TOLERANCE.get(whole.dtype, 3e-2) * (scale * size + of_added) + 1e-12 * size
    return float((found - wanted).abs().amax()) <= least + 1e-30


def calls_own(run: RunBlock, number: int, block: nn.Module, arrival: Arrival) -> bool:
    """Whether a block's forward applies a Function, or registers a hook, of no known library; it is as it was."""
    calls = Calls()
    if any(isinstance(weight, DTensor) for weight in block.parameters()):
        return False
    with suppress(Exception), untouched(block):  # what it says to numbers that no block has given
        with calls.watched():
            ran = run_with_graph(run, number, block, arrival)
        calls.look_at(ran.made)
    return calls.has_own


class BlockBackwards:
    """The backwards of a rank's blocks.

    Args:
        blocks: by stages and numbers.
        run: runs a block on what it is given.
        alike: gives a context in which a block, of a number, draws the same for some samples each time.
        gathered: makes the weights of a stage resident (collective over replicas).
        agree: makes numbers of ranks that run a block together the same.
        overtaken: the stages where a forward of another microbatch may run before a backward.
    """

    def __init__(
        self,
        blocks: Mapping[int, Mapping[int, nn.Module]],
        run: RunBlock,
        alike: Callable[[int, nn.Module, range], AbstractContextManager[None]],
        gathered: Gathered,
        agree: Agree = list,
        overtaken: Collection[int] = (),
    ) -> None:
        self._overtaken = {number for stage in overtaken for number in blocks.get(stage, ())}
        self._blocks, self._run, self._alike, self._gathered, self._agree = blocks, run, alike, gathered, agree
        self._arrival_of: ArrivalOf | None = None
        self._found: dict[int, Unlinear] = {}
        self._watched: dict[int, Watched] = {}
        self._suspects, self._owns = set[int](), False
        self._shape: Shape | None = None
        self._num_changes: dict[int, int] = {}

    @property
    def found(self) -> Unlinear:
        """What the first block is like whose backward is not linear."""
        return next((found for found in self._found.values() if found.why), Unlinear())

    @property
    def suspects(self) -> dict[int, nn.Module]:
        """The blocks that can change gradients, by their numbers."""
        return {n: block for held in self._blocks.values() for n, block in held.items() if n in self._suspects}

    def changed(self) -> list[int]:
        """Return the numbers of the blocks that may have other backwards than they were found to have.

        Once in a step; blocks that are no suspects and change in each step are named ever more rarely.
        """
        if not self._owns and (self._shape is None or self._shape.is_same()):
            return []
        found = [number for number, watched in self._watched.items() if watched.has_changed()]
        for number in found:
            self._num_changes[number] = self._num_changes.get(number, 0) + 1
        return [number for number in found if number in self._suspects or _is_due(self._num_changes[number])]

    def examine(self, arrival_of: ArrivalOf) -> None:
        """Find out which blocks are not linear in gradients; see `again`."""
        self._arrival_of = arrival_of
        self.again({number for blocks in self._blocks.values() for number in blocks})

    def again(self, numbers: Collection[int]) -> None:
        """Find it out of the blocks of these numbers, those of other ranks too (collective over who has the same)."""
        for stage, blocks in sorted(self._blocks.items()):
            some = {number: block for number, block in blocks.items() if number in numbers}
            if some and self._arrival_of is not None:
                known = dict[object, Unlinear]()
                with self._gathered(stage):
                    for number, block in some.items():
                        self._found[number] = self._examine(number, block, self._arrival_of, known)
        self._owns = any(watched.is_own for watched in self._watched.values())
        self._shape = Shape(block for blocks in self._blocks.values() for block in blocks.values())

    def _examine(self, number: int, block: nn.Module, arrival_of: ArrivalOf, known: dict[object, Unlinear]) -> Unlinear:
        """Return what is found of a block; `known` is what was found of others, by their kinds."""
        code = Code(block)
        is_suspect = code.is_suspect
        if code.has_more and not is_suspect:
            arrival = arrival_of(number, False)
            with self._alike(number, block, range(arrival.samples)):
                is_suspect = calls_own(self._run, number, block, arrival)
        kind: object = number
        if is_suspect and _is_of_kind(block, code):
            kind = _kind_of(block, arrival_of(number, True)), number in self._overtaken
        if kind not in known:
            known[kind] = self._find(number, block, arrival_of, code, is_suspect=is_suspect)
        self._suspects = self._suspects | {number} if is_suspect else self._suspects - {number}
        self._watched[number] = Watched(block, code, is_suspect=is_suspect)
        return known[kind]

    def _find(self, number: int, block: nn.Module, arrival_of: ArrivalOf, code: Code, *, is_suspect: bool) -> Unlinear:
        """Return what experiments on a block show."""
        found = Unlinear()
        if is_suspect:
            arrival = arrival_of(number, True)
            found = why_unlinear(self._run, number, block, arrival, partial(self._alike, number, block))
            found = found if found.why else self._of_others(number, block, arrival)
        is_taken = not found.why or found.adds or found.is_of_each
        if is_taken:
            found = self._of_microbatches(number, block, arrival_of, code, found, is_suspect=is_suspect)
            is_taken = not found.why or found.adds or found.is_of_each
        if is_suspect and is_taken and (unknown := code.unknown()) is not None:
            found = Unlinear(_STEERED.format(number, type(block).__name__, f"a {type(unknown).__name__}"))
        return found

    def _of_others(self, number: int, block: nn.Module, arrival: Arrival) -> Unlinear:
        """Return what is found where extras are other numbers than the first ones, or what it asks of tensors is."""
        accepts, alike = accepted_extras(block), partial(self._alike, number, block)
        taken = replace(arrival, extras={name: extra for name, extra in arrival.extras.items() if accepts(name)})
        given = others_of(taken, block, self._agree) if taken.extras else ()
        for other, words in islice(given, 1 if is_sharded(block) else None):  # ranks of other data may fail alone
            if (found := self._found_briefly(number, block, other, alike)).why:
                return found._replace(why=f"{found.why}, {words}")
        answers = OtherAnswers()
        with suppress(Exception), answered(alike, answers)(range(arrival.samples)):
            gradients_of(self._run, number, block, arrival, Begin(0, 1.0), Kept(block))
        for place in range(1, 1 + min(answers.count, MOST_ASKED) * (not is_sharded(block))):
            otherwise = answered(alike, OtherAnswers(place))
            if (found := self._found_briefly(number, block, arrival, otherwise)).why:
                return found._replace(why=f"{found.why}, where a tensor that it asks for its value has another")
        return Unlinear()

    def _found_briefly(self, number: int, block: nn.Module, arrival: Arrival, alike: Alike) -> Unlinear:
        """Return what is found where it is given what it may never be given; what fails tells nothing."""
        with suppress(Exception):
            found = why_unlinear(self._run, number, block, arrival, alike, is_brief=True)
            return found if found.why else Unlinear(why_of_microbatch(self._run, number, block, arrival, alike))
        return Unlinear()

    def _of_microbatches(
        self, number: int, block: nn.Module, arrival_of: ArrivalOf, code: Code, found: Unlinear, *, is_suspect: bool
    ) -> Unlinear:
        """Return why gradients are those of a microbatch, or what was found before."""
        if any(getattr(module, "scale_grad_by_freq", False) is True for module in block.modules()):
            return Unlinear(_COUNTS.format(number, type(block).__name__))
        if not (is_suspect or code.may_detach):
            return found
        given = self._run, number, block, arrival_of(number, True), partial(self._alike, number, block)
        why = "" if found.why else why_of_microbatch(*given)
        if is_suspect and not why:
            why = why_of_others(*given, overtaken=number in self._overtaken)
        return Unlinear(why) if why else found


def _is_due(count: int) -> bool:
    return count <= _ALWAYS or not count & (count - 1)


def _is_of_kind(block: nn.Module, code: Code) -> bool:
    """Whether all by which a block's backward may go is in `_kind_of`, or is trained and changes in each step."""
    weights = [*block.parameters()]
    is_plain = all(key.startswith("_quintsched") for weight in weights for key in vars(weight))
    is_small = all(weight.requires_grad or weight.numel() <= _FROZEN for weight in weights)
    return is_plain and is_small and not code.hooks and not is_sharded(block)


def _kind_of(block: nn.Module, arrival: Arrival) -> object:
    """Return what blocks have in common that change gradients alike."""
    given = [(name, one.tensor.shape, one.tensor.dtype) for name, one in arrival.tensors.items()]
    frozen = [str(weight.tolist()) for weight in block.parameters() if not weight.requires_grad]
    return content_of(block), *given, *frozen
