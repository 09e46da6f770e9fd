"""Blocks whose gradients of a microbatch are linear, but not a part of the batch's; each block is tried alone.

two samples together, and each alone        outputs agree, and gradients have to
backward, and again on top of its sums      twice the sums
forward, another's forward, backward        as without the other
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...blocks.trees import TensorSpec
from ...blocks.without_side_effects import StateCopy, untouched
from ...guards.custom_backwards import hooks_of, is_known
from ...parallel.cut_proofs.trial_inputs import Arrival, TrialInput, draw
from ...user_objects.snapshot import Snapshot
from ..trial_block_runs import TriedBlock

_MIXES = "{} mixes samples in its backward alone, by a hook or a detach, or goes by how many there are"
_GROWN = "{} changes sums of gradients by a hook, once for each microbatch; use optimizer.register_step_pre_hook"
_STEPS = "{} changes weights by a hook within its backward; let the optimizer do so"
_OVERTAKEN = (
    "{} reads in its backward, or in a hook, what its latest forward has kept, which may be that of a later "
    "microbatch; keep it in ctx.save_for_backward, or in the closure of a hook that the same forward registers"
)
_ADDS = "{} adds a gradient to its {!r} in its forward, by a backward of its own or p.grad = …"
_OF_LATER = -0.75
"""Factor from the inputs of a microbatch to those of a later one."""


class _WeightsChanged(Exception):
    """Raised where a hook has changed weights."""


class _Adds(Exception):
    """Raised where a forward has added to the gradient of a weight, with its name."""


def why_of_microbatch(tried: TriedBlock, arrival: Arrival) -> str:
    """Return the reason why joint gradients of samples are not those of each, though outputs are; "": there is none."""
    samples, trials, kept = range(arrival.samples), list[_BlockTrial](), StateCopy(tried.block)
    try:
        whole = _try(tried, kept, [(arrival, samples)])
        for k in samples if len(samples) > 1 else ():
            trials.append(_try(tried, kept, [(arrival.of_sample(k), samples[k : k + 1])]))
    except _Adds as error:
        return _ADDS.format(tried, str(error))
    except Exception:  # it takes no other number of samples, or steps weights
        return ""
    outputs, gradients = (
        ([*zip(*of, strict=True)] for of in zip(*(trial[:2] for trial in trials), strict=True)) if trials else ([], [])
    )
    if not _are_made_of(whole.made, outputs) or _are_made_of(whole.gradients, gradients):
        return ""
    return _MIXES.format(tried)


def why_of_others(tried: TriedBlock, arrival: Arrival, *, overtaken: bool = True) -> str:
    """Return the reason why a block's gradients depend on other microbatches, in words; "": they do not.

    `overtaken`: whether a later one's forward may run before its backward.
    """
    samples = range(arrival.samples)
    turned = [TrialInput(p.tensor.flip(0) if p.tensor.dim() else p.tensor, p.tokens) for p in arrival.activation.parts]
    later = replace(arrival, activation=replace(arrival.activation, parts=turned)).scaled(_OF_LATER)
    hooks, kept = Snapshot({f"hook {k}": hook for k, hook in enumerate(hooks_of(tried.block))}), StateCopy(tried.block)
    try:
        one = _try(tried, kept, [(arrival, samples)])
        twice = _try(tried, kept, [(arrival, samples)], times=2)
        late = _try(tried, kept, [(arrival, samples), (later, samples)]) if overtaken else one
    except _WeightsChanged:
        return _STEPS.format(tried)
    except Exception as error:  # e.g. a backward pops from a list that is empty by then
        return _OVERTAKEN.format(tried) + f" ({type(error).__name__})"
    finally:
        hooks.put_back()
    sums = [[its, its] for its in one.gradients[one.num_leaves :]]
    if not _are_made_of(twice.gradients[one.num_leaves :], sums):
        return _GROWN.format(tried)
    is_same = _are_made_of(one.made, [[made] for made in late.made])
    is_late = is_same and not _are_made_of(one.gradients, [[g] for g in late.gradients])
    return _OVERTAKEN.format(tried) if is_late else ""


class _BlockTrial(NamedTuple):
    """Outputs of a block, and gradients: of its `num_leaves` input leaves, then of its weights."""

    made: Sequence[Tensor]
    gradients: Sequence[Tensor]
    num_leaves: int = 0


def _try(tried: TriedBlock, kept: StateCopy, given: Sequence[tuple[Arrival, range]], times: int = 1) -> _BlockTrial:
    """Run a block's forwards on all inputs, then the backward of the first; the block starts as `kept`.

    The gradients of weights are restored.
    """
    samples, block = given[0][1], tried.block
    with untouched(block, kept), gradients_kept([*block.parameters(), *kept.snapshot.values()]):
        sums: Sequence[Tensor] = []
        for _ in range(times):
            ran = []
            for its, of in given:
                with tried.alike(of):
                    ran.append(tried.run_with_graph(its))
            leaves, weights, made, _loss = ran[0]
            if times == 1 and (
                added := [n for n, p in block.named_parameters() if p.requires_grad and p.grad is not None]
            ):
                raise _Adds(added[0])
            versions = [weight._version for weight in weights]
            begun = [_rows_begun(t, k, samples) for k, t in enumerate(made)]  # same rows for a sample in any batch
            with tried.alike(samples):
                torch.autograd.backward(made, begun)
            if versions != [weight._version for weight in weights]:
                raise _WeightsChanged
            sums = [torch.zeros_like(t) if t.grad is None else t.grad for t in (*leaves, *weights)]
        found = [(g.to_dense() if g.is_sparse else g).detach().clone() for g in sums]
        return _BlockTrial([t.detach().clone() for t in made], found, len(leaves))


def _rows_begun(output: Tensor, place: int, samples: range) -> Tensor:
    """Return output gradients for some samples, equal for a sample in any batch; zeros for outputs of no sample."""
    if not output.dim() or output.shape[0] != len(samples):
        return torch.zeros_like(output)
    rows = [
        draw(TensorSpec((1, *output.shape[1:]), output.dtype), 100 * (k + 1) + place, output.device) for k in samples
    ]
    return torch.cat(rows).to(output.dtype)


_ROUNDING = 64
"""Units in the last place of the largest of all tensors that may remain where numbers cancel."""


def _are_made_of(wholes: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether tensors are the concatenation, or the sum, of those of single samples.

    A gradient that is 0 except for rounding, as that of the bias of keys, is compared with the others' scale.
    """
    largest = max((float(t.abs().amax()) for t in wholes if t.numel()), default=0.0)
    return all(_is_made_of(whole, its, largest) for whole, its in zip(wholes, parts, strict=True))


def _is_made_of(whole: Tensor, parts: Sequence[Tensor], largest: float) -> bool:
    is_sum = parts[0].shape == whole.shape
    found = sum(parts[1:], parts[0]) if is_sum else torch.cat([*parts])
    if found.shape != whole.shape or not whole.numel():
        return found.shape == whole.shape
    relative = 1e-4 if whole.dtype.itemsize >= 4 else 5e-2
    bits = torch.finfo(whole.dtype).eps if whole.is_floating_point() or whole.is_complex() else 0.0
    least = relative * float(whole.abs().amax()) + _ROUNDING * bits * largest
    return float((found - whole).abs().amax()) <= least


@contextmanager
def gradients_kept(things: Iterable[Any]) -> Iterator[None]:
    """Context in which leaf tensors have no gradient, and hooks of this package do not run on them."""
    leaves = {id(t): t for t in things if isinstance(t, Tensor) and t.requires_grad and t.is_leaf}.values()
    kept = [(t, t.grad, t._post_accumulate_grad_hooks, {**(t._post_accumulate_grad_hooks or {})}) for t in leaves]
    for leaf, _, hooks, before in kept:
        leaf.grad = None
        for key, hook in before.items():
            if is_known(getattr(hook, "func", hook)):
                del hooks[key]
    try:
        yield
    finally:
        for leaf, gradient, hooks, before in kept:
            leaf.grad = gradient
            if before:
                hooks.clear()
                hooks.update(before)
