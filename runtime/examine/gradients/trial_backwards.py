"""Trial backwards of a block from drawn gradients of any size: what gradients come, and what its forward gives then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...blocks.trees import TensorSpec
from ...blocks.untouched import Kept, untouched
from ...parallel.proof.arrivals import Arrival, draw
from ...parallel.proof.features_apart import draws_of_python
from ..block_runs import RunBlock, run_with_graph
from .microbatch_gradients import Alike, gradients_kept

Gradients = Sequence[Tensor]

_OF_ONE = 2.0**4
"""After the first draw, how many times larger the gradients of one sample are."""


class Draws(Exception):
    """A block has drawn from Python's or numpy's generator."""


class Begin(NamedTuple):
    """What gradients a trial backward begins with: those drawn from a seed, times `scale`.

    `only` one sample has such; others, or all without a scale, have `rest` of them.
    """

    seed: int
    scale: float
    only: int | None = None
    rest: float = 0.0


def gradients_of(
    run: RunBlock, number: int, block: nn.Module, arrival: Arrival, begin: Begin, kept: Kept
) -> list[Tensor]:
    """Return gradients of what a block, which is as `kept`, is given and of its weights."""
    with untouched(block, kept), gradients_kept([*block.parameters(), *kept.snapshot.values()]):
        drawn = draws_of_python()
        leaves, weights = _run_backwards(run, number, block, arrival, begin)
        if draws_of_python() != drawn:
            raise Draws
        found = [torch.zeros_like(t) if t.grad is None else t.grad for t in (*leaves, *weights) if t.numel()]
        return [(g.to_dense() if g.is_sparse else g).detach().clone() for g in found]


def made_behind(
    run: RunBlock, number: int, block: nn.Module, arrival: Arrival, begin: Begin, kept: Kept, alike: Alike
) -> list[Tensor]:
    """Return what a block, which was as `kept`, gives behind a backward."""
    with untouched(block, kept), gradients_kept([*block.parameters(), *kept.snapshot.values()]):
        with alike(range(arrival.samples)):
            _run_backwards(run, number, block, arrival, begin)
        with alike(range(arrival.samples)):
            made = run_with_graph(run, number, block, arrival).made
        return [tensor.detach().clone() for tensor in made if tensor.numel()]


def _run_backwards(
    run: RunBlock, number: int, block: nn.Module, arrival: Arrival, begin: Begin
) -> tuple[Sequence[Tensor], Sequence[nn.Parameter]]:
    """Run a block forwards and backwards; return what it was given, and its weights, which have the gradients."""
    leaves, weights, made, _ = run_with_graph(run, number, block, arrival)
    if made:  # not by autograd.grad, which checkpoints may refuse
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
        scales.fill_(begin.rest)  # of what belongs to no sample all is in the first
    return drawn * scales
