"""Backwards of blocks that are not linear in the gradient: what is right for a batch is wrong for its microbatches.

    gradients in flight belong to one microbatch, times the weight of its loss; the total divides their sums

    g * mask, -g, straight-through              linear                 as in one process
    x.register_hook(lambda g: g.clamp(…))       clamps, clips, signs   another threshold for each way to cut a batch
    backward: return g, torch.ones(())          adds a constant        right where each microbatch weighs 1
    backward: return g.clamp(…)                 for each sample alone  right where the loss is a sum

Blocks whose code can do so are run on a few samples before the first step, backwards from gradients of several sizes,
and of some samples alone. Hooks on weights count as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..agreement.user_code import is_of_library, names_read
from ..blocks.trees import TensorSpec
from ..blocks.untouched import untouched
from ..data.snapshot import Snapshot
from ..parallel.proof.arrivals import Arrival, draw
from .block_runs import RunBlock, run_with_graph

_NAMES = frozenset({"apply", "register_hook", "register_multi_grad_hook", "register_prehook"}) | {
    *("register_full_backward_hook", "register_full_backward_pre_hook", "register_post_accumulate_grad_hook"),
}
"""What code names that calls a Function of autograd, or registers a hook while it runs."""

_SCALES, _SHORT_SCALES = (2.0**-10, 2.0**10), (2.0**-4, 2.0**4)
_TINY = 2.0**-60
_DRAWS, _OF_ONE = 4, 2.0**4
"""How often gradients are drawn; after the first time, how many times larger those of one sample are."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}

Gradients = Sequence[Tensor]


class _Begin(NamedTuple):
    """What gradients a trial backward begins with: those drawn from a seed, times `scale`.

    `only` one sample has such; others, or all without a scale, have `rest` of them.
    """

    seed: int
    scale: float
    only: int | None = None
    rest: float = 0.0


class Unlinear(NamedTuple):
    """Why the backward of a block is not linear, in words; "": it is.

    `adds`: but for what it adds to gradients. `is_of_each`: each sample has the gradient that it has alone.
    """

    why: str = ""
    adds: bool = False
    is_of_each: bool = False


def suspects(blocks: Mapping[int, nn.Module]) -> dict[int, nn.Module]:
    """Return the blocks whose code, or hooks, may change gradients, each module once."""
    found: dict[int, tuple[int, nn.Module]] = {}
    for number, block in blocks.items():
        if _hooks(block) or any(not _NAMES.isdisjoint(names_read(module)) for module in _with_code(block)):
            found.setdefault(id(block), (number, block))
    return dict(found.values())


def why_unlinear(
    run: RunBlock,
    number: int,
    block: nn.Module,
    arrival: Arrival,
    alike: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Unlinear:
    """Return why a block's gradients are not proportional to those that it is given; it is as it was.

    Args:
        run: runs a block on what it is given.
        number: of the block.
        block: its weights are resident.
        arrival: what it is given.
        alike: a context in which it draws the same each time.
    """
    is_short = any(p.dtype is torch.float16 for p in block.parameters())
    scales = _SHORT_SCALES if is_short else _SCALES
    hooks = Snapshot({f"hook {k}": hook for k, hook in enumerate(_hooks(block))})

    def backward(seed: int, scale: float, only: int | None = None) -> Gradients:
        for rest in (0.0, _TINY):  # of nothing, 0 / 0
            with alike():
                found = _gradients(run, number, block, arrival, _Begin(seed, scale, only, rest))
            if all(bool(gradient.isfinite().all()) for gradient in found):
                break
        return found

    try:
        none, others = backward(0, 0.0), [(scale, backward(0, scale)) for scale in scales]
        ones = [backward(seed, 1.0) for seed in range(_DRAWS)]
        halves = [[backward(seed, 1.0, only=sample) for sample in range(arrival.samples)] for seed in range(_DRAWS)]
    except Exception:  # what a user's code says to numbers that no block has given
        return Unlinear()
    finally:
        hooks.put_back()

    def adds_up(added: Gradients) -> bool:
        return all(_adds_up(one, parts, added) for one, parts in zip(ones, halves, strict=True))

    zeros = [torch.zeros_like(gradient) for gradient in none]
    is_of_each = adds_up(zeros)
    if is_of_each and _is_linear(none, ones[0], others, zeros):
        return Unlinear()
    adds = _is_linear(none, ones[0], others, none) and adds_up(none)
    what = "adds to gradients" if adds else "changes gradients by more than a factor, as a clamp does,"
    said = f"block {number} ({type(block).__name__}) {what} in its backward, or by a hook"
    return Unlinear(said, adds, is_of_each)


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


def _gradients(run: RunBlock, number: int, block: nn.Module, arrival: Arrival, begin: _Begin) -> list[Tensor]:
    """Return gradients of what a block is given and of its weights."""
    with torch.enable_grad(), untouched(block):
        leaves, weights, made, _ = run_with_graph(run, number, block, arrival)
        begun = [_begun(t, place, arrival.samples, begin) for place, t in enumerate(made)]
        found = torch.autograd.grad(made, [*leaves, *weights], begun, allow_unused=True)
        filled = [torch.zeros_like(t) if g is None else g for t, g in zip([*leaves, *weights], found, strict=True)]
        after = [_after_hooks(p, g) for p, g in zip(weights, filled[len(leaves) :], strict=True)]
        return [g.detach().clone() for g in (*filled[: len(leaves)], *after) if g.numel()]


def _begun(output: Tensor, place: int, samples: int, begin: _Begin) -> Tensor:
    number = 100 * (1 + begin.seed) + place
    drawn = draw(TensorSpec(tuple(output.shape), output.dtype), number, output.device).to(output.dtype)
    scales = torch.full_like(drawn, begin.scale or begin.rest)
    has_samples = bool(drawn.dim()) and drawn.shape[0] == samples
    if begin.seed and has_samples:
        drawn[begin.seed % samples] *= _OF_ONE
    if begin.only is not None and has_samples:
        scales[: begin.only] = scales[begin.only + 1 :] = begin.rest
    elif begin.only:
        scales.fill_(begin.rest)  # of what belongs to no sample all is in the first
    return drawn * scales


def _after_hooks(weight: nn.Parameter, gradient: Tensor) -> Tensor:
    """Return what hooks make of a weight's gradient once it is added up."""
    hooks = [hook for hook in (weight._post_accumulate_grad_hooks or {}).values() if not is_of_library(_function(hook))]
    if not hooks:
        return gradient
    before, weight.grad = weight.grad, gradient.clone()
    try:
        for hook in hooks:
            hook(weight)
        return torch.zeros_like(gradient) if weight.grad is None else weight.grad
    finally:
        weight.grad = before


def _hooks(block: nn.Module) -> list[Any]:
    """Return hooks of a user's on gradients of modules and weights."""
    return [hook for module in block.modules() for hook in _hooks_of(module)]


def _hooks_of(module: nn.Module) -> Iterator[Any]:
    weights = module._parameters.values()
    of_weights = (h for p in weights if p is not None for h in (p._backward_hooks, p._post_accumulate_grad_hooks))
    for held in (module._backward_hooks, module._backward_pre_hooks, *of_weights):
        yield from (hook for hook in (held or {}).values() if not is_of_library(_function(hook)))


def _function(hook: Any) -> Any:
    return getattr(hook, "func", hook)


def _with_code(block: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a block, and those of the model whose code it has a part of."""
    yield from block.modules()
    root = getattr(getattr(getattr(block, "_origin", None), "frame", None), "root", None)
    if isinstance(root, nn.Module):
        yield from root.modules()
