"""Hooks that move gradients from backwards into their buckets, and detect when a bucket is full.

    first backward ──▶ parameter.grad, new      a hook copies it to its view in the bucket, which becomes .grad
    next ones      ──▶ parameter.grad, a view   autograd adds in place; in small buckets, which start at zero, always
                   ──▶ another dtype, or DTensor   never becomes the view, and the hook adds it
    weight half of a split backward ──▶ `drain`                         adds to the view

In a stage's last backward each arrival is recorded; a bucket with all of its gradients is ready to be launched.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from quintsched.errors import MisfitError

from ..autograd.deferred_weight_grads import Products
from ..blocks.dtensor import local_gradient
from .grad_buckets import GradBucket, GradBuckets, can_be_grad
from .grad_reducer import GradReducer


class GradHooks:
    """Fills the buckets of one rank, and has `reducer` launch them when they are full."""

    def __init__(self, buckets: GradBuckets, reducer: GradReducer) -> None:
        self._home, self._reducer = buckets.home, reducer
        self._filled = {bucket.stage: reducer.filled_by_backward(bucket.stage) for bucket in buckets.all}
        for parameter, (bucket, view) in buckets.home.items():
            parameter._quintsched_sum = view  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket, view))

    def _arrived(self, bucket: GradBucket, view: Tensor, parameter: Tensor) -> None:
        """Add a gradient from a backward to its bucket (post-accumulate-grad hook); see the picture above."""
        if parameter.grad is not view:
            _take_in(bucket, view, parameter)
        if bucket.notes_arrivals:
            if parameter not in bucket.missing:
                raise MisfitError(
                    f"a weight of stage {bucket.stage}, {tuple(parameter.shape)}, got gradients twice in one "
                    "backward, as one does that checkpointed parts of a block share; let the plan recompute instead"
                )
            bucket.missing.discard(parameter)
            if not bucket.missing:
                self._launch(bucket)

    def expect_last(self, stage: int) -> None:
        """Record arrivals in the stage's last backward, which comes next, to launch buckets when they are full."""
        for bucket in self._filled.get(stage, ()):
            bucket.notes_arrivals = True

    def _launch(self, bucket: GradBucket) -> None:
        """Mark a complete bucket as ready; the reducer launches it in order."""
        bucket.ready = True
        self._reducer.launch_ready()

    def drain(self, products: Products) -> None:
        """Compute the deferred weight gradients of a backward, and accumulate them."""
        products.drain(self._accumulate)

    def drain_last(self, stage: int, products: Products) -> None:
        """`drain`, after which the stage's gradients are complete: buckets are launched as soon as they are full."""
        early = dict.fromkeys(self._filled.get(stage, ()))
        coming = set(products.parameters())
        for bucket in early:
            bucket.missing &= coming  # the others have no deferred gradients
            if not bucket.missing:
                self._launch(bucket)

        def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
            self._accumulate(parameter, gradient)
            bucket = self._home[parameter][0]
            if bucket in early:
                bucket.missing.discard(parameter)
                if not bucket.missing:
                    self._launch(bucket)

        products.drain(accumulate)

    def _accumulate(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add to a parameter's gradient in its bucket."""
        bucket, view = self._home[parameter]
        bucket.add(parameter, view, gradient)


def _take_in(bucket: GradBucket, view: Tensor, parameter: Tensor) -> None:
    """Add a parameter's new gradient, which is not the view of its sum, to it; None for a deferred gradient.

    The view may belong to a closed engine, while another one trains the same weights: then nothing is added.
    """
    is_ours = bucket.is_open and getattr(parameter, "_quintsched_sum", None) is view
    if parameter.grad is None or not is_ours:
        return
    gradient = local_gradient(parameter)
    bucket.allocate_full()
    bucket.add(parameter, view, gradient)
    parameter.grad = view if can_be_grad(view, parameter) else None
