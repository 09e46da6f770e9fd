"""Trial backwards of a block from drawn output gradients of any scale: the gradients, and a later forward's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...blocks.trees import TensorSpec
from ...blocks.without_side_effects import Kept, untouched
from ...parallel.cut_proofs.features_apart import draws_of_python
from ...parallel.cut_proofs.trial_inputs import Arrival, draw
from ..block_runs import TriedBlock
from .microbatch_gradients import gradients_kept

TrialGradients = Sequence[Tensor]

_OF_ONE = 2.0**4
"""Factor on the gradients of one sample, after the first draw."""


class Draws(Exception):
    """Raised where a block draws from Python's or numpy's generator."""


class Begin(NamedTuple):
    """Output gradients that a trial backward starts from: drawn with a seed, times `scale`.

    With `only`, one sample has these; the others, or all if `scale` is 0, are scaled by `rest`.
    """

    seed: int
    scale: float
    only: int | None = None
    rest: float = 0.0


def gradients_of(tried: TriedBlock, arrival: Arrival, begin: Begin, kept: Kept) -> list[Tensor]:
    """Return the gradients of a block's inputs and weights; the block starts as `kept`."""
    with untouched(tried.block, kept), gradients_kept([*tried.block.parameters(), *kept.snapshot.values()]):
        drawn = draws_of_python()
        leaves, weights = _run_backwards(tried, arrival, begin)
        if draws_of_python() != drawn:
            raise Draws
        found = [torch.zeros_like(t) if t.grad is None else t.grad for t in (*leaves, *weights) if t.numel()]
        return [(g.to_dense() if g.is_sparse else g).detach().clone() for g in found]


def made_behind(tried: TriedBlock, arrival: Arrival, begin: Begin, kept: Kept) -> list[Tensor]:
    """Return a block's outputs of a forward after a backward; the block starts as `kept`."""
    with untouched(tried.block, kept), gradients_kept([*tried.block.parameters(), *kept.snapshot.values()]):
        with tried.alike(range(arrival.samples)):
            _run_backwards(tried, arrival, begin)
        with tried.alike(range(arrival.samples)):
            made = tried.run_with_graph(arrival).made
        return [tensor.detach().clone() for tensor in made if tensor.numel()]


def _run_backwards(
    tried: TriedBlock, arrival: Arrival, begin: Begin
) -> tuple[Sequence[Tensor], Sequence[nn.Parameter]]:
    """Run a block's forward and backward; return its input leaves and weights, which have the gradients."""
    leaves, weights, made, _ = tried.run_with_graph(arrival)
    if made:  # torch.autograd.grad is refused by reentrant checkpoints
        torch.autograd.backward(made, [_begun(t, k, arrival.samples, begin) for k, t in enumerate(made)])
    return leaves, weights


def _begun(output: Tensor, place: int, samples: int, begin: Begin) -> Tensor:
    number = 100 * (1 + begin.seed) + place
    drawn = draw(TensorSpec(tuple(output.shape), output.dtype), number, output.device).to(output.dtype)
    scales = torch.full_like(drawn, begin.scale or begin.rest)
    has_samples = bool(drawn.dim()) and drawn.shape[0] == samples
    if begin.seed and has_samples:
        drawn[begin.seed % samples] *= _OF_ONE
    if begin.only is not None and has_samples:
        scales[: begin.only] = scales[begin.only + 1 :] = begin.rest
    elif begin.only:
        scales.fill_(begin.rest)  # outputs of no sample count with the first
    return drawn * scales
