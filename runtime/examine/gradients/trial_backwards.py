"""Trial backwards of a block from drawn output gradients of any scale: the gradients, and a later forward's outputs.

Mode that replaces a Python value that user code reads from a tensor, to run the other branch.

    if x.abs().max() > 20: h.register_hook(clamp)      no       once as if it were: a backward that clamps
    self.log = float(h.norm())                         1.7      once as if it were 1000000.0: the same backward

Data of later steps may take that branch, which a few drawn samples need not reach.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...blocks.trees import TensorSpec
from ...blocks.without_side_effects import StateCopy, untouched
from ...parallel.cut_proofs.prove_features_independent import draws_of_python
from ...parallel.cut_proofs.trial_inputs import Arrival, draw
from ...user_objects.library_or_user import is_library_module
from ..trial_block_runs import SameDraws, TriedBlock
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


def gradients_of(tried: TriedBlock, arrival: Arrival, begin: Begin, kept: StateCopy) -> list[Tensor]:
    """Return the gradients of a block's inputs and weights; the block starts as `kept`."""
    with untouched(tried.block, kept), gradients_kept([*tried.block.parameters(), *kept.snapshot.values()]):
        drawn = draws_of_python()
        leaves, weights = _run_backwards(tried, arrival, begin)
        if draws_of_python() != drawn:
            raise Draws
        found = [torch.zeros_like(t) if t.grad is None else t.grad for t in (*leaves, *weights) if t.numel()]
        return [(g.to_dense() if g.is_sparse else g).detach().clone() for g in found]


def made_behind(tried: TriedBlock, arrival: Arrival, begin: Begin, kept: StateCopy) -> list[Tensor]:
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


MOST_ASKED = 16
_ASKING = frozenset({"item", "__bool__", "__int__", "__float__", "__index__"})
_LARGE = 1e6


class OtherAnswers(TorchFunctionMode):
    """Mode that changes the value of the read at `place`, counted from 1; 0: of none.

    Attributes:
        count: number of reads by user code.
    """

    def __init__(self, place: int = 0) -> None:
        super().__init__()
        self._place, self.count = place, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and count it where it returns a Python value of a tensor to user code."""
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in _ASKING or isinstance(result, complex):
            return result
        if is_library_module(str(sys._getframe(1).f_globals.get("__name__", ""))):
            return result
        self.count += 1
        return _other(result) if self.count == self._place else result


def answered(alike: SameDraws, answers: OtherAnswers) -> SameDraws:
    """Return `alike` with the mode entered as well, its count reset each time."""

    @contextmanager
    def within(samples: range) -> Iterator[None]:
        answers.count = 0
        with alike(samples), answers:
            yield

    return within


def _other(answer: bool | int | float) -> bool | int | float:
    if isinstance(answer, float):
        return _LARGE if abs(answer) < _LARGE / 2 else 0.0
    return type(answer)(not answer)
