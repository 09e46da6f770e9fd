"""Activation recomputation (checkpointing): a forward keeps only its inputs, and is run again before its backward.

    Fwd         x ──▶ run under no_grad       ──▶ y        kept: x, and the states of the random generators
    Recompute   x ──▶ run again with grad     ──▶ (y)      activations are stored again
    Bwd         ∂x ◀── through the new autograd graph ◀── ∂y

The plan schedules `Recompute`, so that it can overlap with receiving the gradient. For autograd the first forward is
one function, whose backward runs the backward of the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from quintsched.errors import MisfitError

from ..comm.random_generators import fork_generators, generator_states, restore_generators
from .autograd_engine_call import run_backward

RunForward = Callable[[tuple[Tensor, ...], Mapping[str, Any]], tuple[tuple[Tensor, ...], Tensor | None]]


OTHERWISE = (
    "blocks that are recomputed gave other numbers when run again for their backward, off by {:.1e}: a forward changes "
    "what it goes by (a counter, a buffer, a list), or asks torch.is_grad_enabled() or x.requires_grad; change state "
    "in the training loop, ask self.training, or compile the plan with recompute=0"
)


class Rerun:
    """A forward of some blocks whose activations were dropped; `again` recomputes them."""

    def __init__(
        self,
        run: RunForward,
        buffers: Callable[[], Iterable[Tensor]],
        given: tuple[Tensor, ...],
        extras: Mapping[str, Any],
        *,
        is_compared: bool,
    ) -> None:
        self._run = run
        self._buffers = buffers
        self._given: tuple[Tensor, ...] = given
        self._extras = extras
        self._generators = generator_states(given[0].device)
        self._outputs: tuple[Tensor, ...] = ()
        self._count: int | None = None
        self._is_compared, self._first = is_compared, list[tuple[Tensor, int]]()
        self.has_auxiliary = False

    def flat(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the blocks, and return outputs and auxiliary loss in one tuple."""
        outputs, auxiliary = self._run(given, self._extras)
        self.has_auxiliary = auxiliary is not None
        row = outputs if auxiliary is None else (*outputs, auxiliary)
        if self._count not in (None, len(row)):
            raise MisfitError(
                f"blocks that are recomputed gave {self._count} tensors at first, and {len(row)} when run again with "
                "gradients: what they give must not depend on torch.is_grad_enabled(); ask self.training, or compile "
                "the plan with recompute=0"
            )
        self._count = len(row)
        if self._is_compared and not torch.is_grad_enabled():
            self._first = [(tensor.detach(), tensor._version) for tensor in row]
        return row

    def again(self) -> None:
        """Run again with grad and the same generator states; buffers keep their values from after the first run."""
        device = self._given[0].device
        buffers = [(buffer, buffer.clone()) for buffer in self._buffers()]
        self._given, views = _apart(self._given)
        with fork_generators(device), torch.enable_grad():
            restore_generators(device, self._generators)
            self._outputs = self.flat(views)
            self._require_same()
        for buffer, before in buffers:
            buffer.data.copy_(before)  # no version count: the graph may have saved it

    def _require_same(self) -> None:
        """Raise `MisfitError` if the outputs differ from the first run's by more than nondeterministic summation."""
        for (first, version), again in zip(self._first, self._outputs, strict=False):
            if first._version != version or torch.equal(first, again):
                continue
            kind = first.dtype if first.is_floating_point() else torch.float64
            before, now = first.double().nan_to_num(), again.detach().double().nan_to_num()
            off, size = float((now - before).abs().max()), float(before.abs().max())
            if off > torch.finfo(kind).eps ** 0.5 * size:
                raise MisfitError(OTHERWISE.format(off))
        self._first = []

    def backward(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Run the backward of the second forward: return input gradients, and accumulate those of weights."""
        outputs, self._outputs = self._outputs, ()
        given, self._given = self._given, ()
        used = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad and g is not None]
        run_backward([output for output, _ in used], [gradient for _, gradient in used])
        return tuple(tensor.grad for tensor in given)


def _apart(given: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return leaf tensors of the inputs, and views of these: hidden states are no leaf tensors either.

    So a hook that a block registers on its input in the first run is not on the input of the second.
    """
    leaves = tuple([t.detach().requires_grad_(t.requires_grad) for t in given])
    with torch.enable_grad():
        return leaves, tuple([leaf.view_as(leaf) for leaf in leaves])


def run_dropped(
    run: RunForward,
    buffers: Callable[[], Iterable[Tensor]],
    given: tuple[Tensor, ...],
    extras: Mapping[str, Any],
    reruns: list[Rerun],
    *,
    is_compared: bool = False,
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Run under no_grad, and append the `Rerun` to `reruns`. `buffers` yields the buffers that a run may change.

    If `is_compared`, outputs are kept until the second run, which raises `MisfitError` if its own differ.
    """
    rerun = Rerun(run, buffers, given, extras, is_compared=is_compared)
    reruns.append(rerun)
    anchor = torch.empty(0, requires_grad=True)  # a first stage's inputs need no gradient, but its weights do
    outputs: tuple[Tensor, ...] = _Dropped.apply(rerun, anchor, *given)  # type: ignore[no-untyped-call]
    return (outputs[:-1], outputs[-1]) if rerun.has_auxiliary else (outputs, None)


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rerun: Rerun, anchor: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.rerun = rerun
        ctx.save_for_backward(*given)
        # Autograd marks returned tensors as its outputs; a weight, buffer or extra must not be: return aliases.
        return tuple([output.detach() for output in rerun.flat(_apart(given)[1])])

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        rerun: Rerun = ctx.rerun  # type: ignore[attr-defined]
        return (None, None, *rerun.backward(gradients))
