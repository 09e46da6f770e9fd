"""How gradients get from backwards into their buckets, and how a bucket is known to be full.

    backward ──▶ parameter.grad, which is its view in the bucket        autograd adds in place
             ──▶ another type, a DTensor, or no full gradients yet      a hook moves it into the view
    weight half of a split backward ──▶ `drain`                         adds to the view

In a stage's last backward each arrival is noted; a bucket whose gradients are all there is ready to be launched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quintsched.errors import MisfitError

from ..autograd.deferred_weight_grads import Products
from ..blocks.dtensor import local_gradient
from .grad_buckets import GradBucket, GradBuckets
from .grad_reducer import GradReducer


class GradHooks:
    """Fills the buckets of one rank, and lets `reducer` launch them when they are full."""

    def __init__(self, buckets: GradBuckets, reducer: GradReducer) -> None:
        self._home, self._reducer = buckets.home, reducer
        for parameter, (bucket, view) in buckets.home.items():
            parameter._quintsched_sum = view  # type: ignore[attr-defined]
            if bucket.reshards or not _can_be_grad(view, parameter):
                parameter.register_post_accumulate_grad_hook(partial(_move_into, bucket, view))

    @contextmanager
    def last_backward(self, stage: int) -> Iterator[None]:
        """A context in which buckets of `stage` are launched as soon as the backward in it has filled them."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._noting(bucket))
            for bucket in self._reducer.filled_by_backward(stage)
            for parameter in bucket.parameters
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _noting(self, bucket: GradBucket) -> Callable[[Tensor], None]:
        def arrived(parameter: Tensor) -> None:
            if parameter not in bucket.missing:
                raise MisfitError(
                    f"a weight of stage {bucket.stage}, {tuple(parameter.shape)}, got gradients twice in one "
                    "backward, as one does that checkpointed parts of a block share; let the plan recompute instead"
                )
            self._note(bucket, parameter)

        return arrived

    def _note(self, bucket: GradBucket, parameter: Tensor) -> None:
        """Note that the gradient of a parameter is complete, and launch the bucket if all are."""
        bucket.missing.discard(parameter)
        if not bucket.missing:
            bucket.ready = True
            self._reducer.launch_ready()

    def drain(self, products: Products) -> None:
        """Compute what a backward has put off, and add it up."""
        products.drain(self._accumulate)

    def drain_last(self, stage: int, products: Products) -> None:
        """`drain` after which the stage's gradients are complete: buckets are launched as soon as they are filled."""
        early = dict.fromkeys(self._reducer.filled_by_backward(stage))
        self._note_arrived(early, set(products.parameters()))

        def accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
            self._accumulate(parameter, gradient)
            bucket = self._home[parameter][0]
            if bucket in early:
                self._note(bucket, parameter)

        products.drain(accumulate)

    def _note_arrived(self, buckets: Iterable[GradBucket], coming: Collection[Tensor]) -> None:
        """Note all gradients that are complete, since nothing of theirs is put off."""
        for bucket in buckets:
            for parameter in [p for p in bucket.parameters if p not in coming]:
                self._note(bucket, parameter)

    def _accumulate(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add to the gradient of a parameter, as a backward does."""
        self._home[parameter][1].add_(gradient)


def _can_be_grad(view: Tensor, parameter: Tensor) -> bool:
    """Whether a parameter's gradient can be this view, so that backwards add to it."""
    return parameter.dtype == view.dtype and not isinstance(parameter, DTensor)


def _move_into(bucket: GradBucket, view: Tensor, parameter: Tensor) -> None:
    """Add a parameter's new gradient to its sum, which is longer, local or not resident yet; one put off is none yet.

    The sum may be that of an engine which is no longer in use, while another one trains the same weights.
    """
    if parameter.grad is None or parameter.grad is view or getattr(parameter, "_quintsched_sum", None) is not view:
        return
    gradient = local_gradient(parameter)
    bucket.allocate_full()
    view.add_(gradient)
    parameter.grad = view if _can_be_grad(view, parameter) else None
