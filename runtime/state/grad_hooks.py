"""How gradients get from backwards into their buckets, and how a bucket is known to be full.

    first backward ──▶ parameter.grad, new      a hook moves it into its view in the bucket, which becomes .grad
    next ones      ──▶ parameter.grad, a view   autograd adds in place; in small buckets, which begin at zero, at once
                   ──▶ of another type, or a DTensor: it never becomes the view, and the hook adds it
    weight half of a split backward ──▶ `drain`                         adds to the view

In a stage's last backward each arrival is noted; a bucket whose gradients are all there is ready to be launched.
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
    """Fills the buckets of one rank, and lets `reducer` launch them when they are full."""

    def __init__(self, buckets: GradBuckets, reducer: GradReducer) -> None:
        self._home, self._reducer = buckets.home, reducer
        self._filled = {bucket.stage: reducer.filled_by_backward(bucket.stage) for bucket in buckets.all}
        for parameter, (bucket, view) in buckets.home.items():
            parameter._quintsched_sum = view  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, bucket, view))

    def _arrived(self, bucket: GradBucket, view: Tensor, parameter: Tensor) -> None:
        """Take in what a backward brings; see the picture above."""
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
        """Launch buckets of `stage` as soon as its last backward, which comes next, has filled them."""
        for bucket in self._filled.get(stage, ()):
            bucket.notes_arrivals = True

    def _launch(self, bucket: GradBucket) -> None:
        """Launch a bucket whose gradients are all complete, when its turn comes."""
        bucket.ready = True
        self._reducer.launch_ready()

    def drain(self, products: Products) -> None:
        """Compute what a backward has put off, and add it up."""
        products.drain(self._accumulate)

    def drain_last(self, stage: int, products: Products) -> None:
        """`drain` after which the stage's gradients are complete: buckets are launched as soon as they are filled."""
        early = dict.fromkeys(self._filled.get(stage, ()))
        coming = set(products.parameters())
        for bucket in early:
            bucket.missing &= coming  # nothing of the others' is put off
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
        """Add to the gradient of a parameter, as a backward does."""
        bucket, view = self._home[parameter]
        bucket.add(parameter, view, gradient)


def _take_in(bucket: GradBucket, view: Tensor, parameter: Tensor) -> None:
    """Add a parameter's new gradient, which is not the view of its sum, to it; one put off is none yet.

    The sum may be that of an engine which is no longer in use, while another one trains the same weights.
    """
    is_ours = bucket.is_open and getattr(parameter, "_quintsched_sum", None) is view
    if parameter.grad is None or not is_ours:
        return
    gradient = local_gradient(parameter)
    bucket.allocate_full()
    bucket.add(parameter, view, gradient)
    parameter.grad = view if can_be_grad(view, parameter) else None
