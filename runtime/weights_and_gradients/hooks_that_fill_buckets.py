"""Hooks that move gradients from backwards into their buckets, and detect when a bucket is full.

    first backward ──▶ parameter.grad, new      is copied to its view in the bucket, which becomes .grad
    next ones      ──▶ parameter.grad, a view   autograd adds in place; in small buckets, which start at zero, always
                   ──▶ another dtype, or DTensor   never becomes the view, and is added to it
    weight half of a split backward ──▶ `drain`                         adds to the view

Where autograd adds in place from the first on, a parameter has a hook only if its bucket is launched early. A hook
costs each parameter and microbatch, so it only lists what has arrived. A bucket takes in what is listed when its last
parameter arrives, by one call for all, or a large one, and when the backward ends. In a stage's last backward a bucket
with all of its gradients is ready to be launched.

Intake of gradients that a backward has left in `.grad`: added to their views, by one call for a bucket's.

arrived   [p9 p8 p7]     .grad a view already                     nothing: autograd has added in place
                         .grad new                                added to its view
                         .grad None: deferred, or come twice      nothing; taken away by a hook: refused
in place  .grad is no view: user code has taken it in a step      put back, after adding what came instead
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quintsched.errors import MisfitError

from ..autograd.deferred_weight_grads import Products, queue_of
from ..blocks.dtensor import local_gradient
from .grad_buckets import IN_CACHE, GradBucket, GradBuckets
from .launch_bucket_reductions import GradReducer


class GradHooks:
    """Fills the buckets of one rank, and has `reducer` launch them when they are full; `remove` ends that."""

    def __init__(self, buckets: GradBuckets, reducer: GradReducer) -> None:
        self._home, self._reducer = buckets.home, reducer
        self._filled = {bucket.stage: reducer.filled_by_backward(bucket.stage) for bucket in buckets.all}
        self._hooked, self._in_place = list[GradBucket](), list[GradBucket]()
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._lasts: dict[GradBucket, Tensor] = {}
        for parameter, (_, view) in buckets.home.items():
            parameter._quintsched_sum = view  # type: ignore[attr-defined]
        for bucket in buckets.all:
            if bucket.adds_in_place and bucket not in self._filled[bucket.stage]:
                self._in_place.append(bucket)
                continue
            self._hooked.append(bucket)
            self._lasts[bucket] = last = bucket.parameters[-1]
            for parameter in bucket.parameters:
                hook = self._hook(bucket, parameter, is_last=parameter is last)
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)
        self.remove = finalize(self, _remove, list(self._hooks.values()))
        self.remove.atexit = False

    def _expect_as_last(self, bucket: GradBucket, parameter: Tensor) -> None:
        """Have a bucket take in its gradients when this parameter arrives: the last of a backward, usually."""
        last, self._lasts[bucket] = self._lasts[bucket], parameter
        for one in (last, parameter):
            one._post_accumulate_grad_hooks[self._hooks[one].id] = self._hook(bucket, one, is_last=one is parameter)

    def _hook(self, bucket: GradBucket, parameter: Tensor, *, is_last: bool) -> Callable[[Tensor], None]:
        """Return a parameter's hook: it takes in a bucket's gradients, or lists that this one has come.

        A large gradient is not listed: it would leave the cache, and its memory would be held. A parameter must not
        keep its engine alive: the garbage collector does not see cycles through its hooks.
        """
        lists = not is_last and parameter.numel() <= IN_CACHE
        return bucket.arrived if lists else partial(_arrived_last, ref(self), ref(bucket))

    def settler(self) -> Callable[[], None]:
        """Return a function that takes in the gradients of a backward that has ended.

        It may have come to weights of other stages too.
        """
        in_place = self._in_place
        return partial(keep_in_place, in_place[0]) if len(in_place) == 1 and not self._hooked else self._settle_all

    def _settle_all(self) -> None:
        for bucket in self._hooked:
            if bucket.arrived:
                self._expect_as_last(bucket, bucket.arrived[-1])
                self._settle(bucket)
        for bucket in self._in_place:
            keep_in_place(bucket)

    def _settle(self, bucket: GradBucket) -> None:
        arrived = take_in(bucket)
        if bucket.notes_arrivals and arrived:
            left = len(bucket.missing)
            bucket.missing.difference_update(arrived)
            if left - len(bucket.missing) != len(arrived):
                _refuse_twice(bucket, arrived)
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
        bucket.add_gradient(parameter, view, gradient)


def _arrived_last(hooks: ref[GradHooks], bucket: ref[GradBucket], parameter: Tensor) -> None:
    its, of = hooks(), bucket()
    if its is not None and of is not None:
        of.arrived.append(parameter)
        its._settle(of)


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _refuse_twice(bucket: GradBucket, arrived: Sequence[Tensor]) -> NoReturn:
    shapes = [tuple(parameter.shape) for parameter, times in Counter(arrived).items() if times > 1]
    raise MisfitError(
        f"a weight of stage {bucket.stage}, {(shapes or [tuple(arrived[0].shape)])[0]}, got gradients twice in one "
        "backward, as one does that checkpointed parts of a block share; let the plan recompute instead"
    )


def take_in(bucket: GradBucket) -> list[Tensor]:
    """Add what has arrived and is not in its view yet; return the parameters that it came for.

    A view may belong to a closed engine, while another one trains the same weights: then nothing is added.
    Raises `MisfitError` where a hook has taken a gradient away, or has replaced a sum.
    """
    arrived, views, gradients = bucket.arrived[:], list[Tensor](), list[Tensor]()
    bucket.arrived.clear()
    begins_at_zero, own, kept, blank = bucket.begins_at_zero, bucket.own, bucket.kept, bucket.blank
    for parameter in arrived if bucket.is_open else ():
        gradient, view = parameter.grad, parameter._quintsched_sum  # type: ignore[attr-defined]
        if gradient is view or id(view) not in own:
            continue
        keeps_view = id(view) in kept
        if gradient is None:
            _require_taken(bucket, parameter, arrived)
        else:
            if keeps_view and (begins_at_zero or parameter not in blank):
                _require_not_replaced(bucket, parameter, own_hooks=1)
            if begins_at_zero and type(gradient) is Tensor and gradient.layout is torch.strided:
                views.append(view)
                gradients.append(gradient)
            else:
                gradient = local_gradient(parameter)
                bucket.allocate_full()
                bucket.add_gradient(parameter, view, gradient)
        parameter.grad = view if keeps_view else None
    if views:
        torch._foreach_add_(views, gradients)
    return arrived


def keep_in_place(bucket: GradBucket) -> None:
    """Put back views that user code has taken from `.grad` since the last backward, and add what came instead.

    Raises `MisfitError` where a hook has replaced a sum, or taken it away.
    """
    for parameter, view in bucket.pairs if bucket.is_open else ():
        if parameter.grad is not view and id(getattr(parameter, "_quintsched_sum", None)) in bucket.own:
            if parameter.grad is not None:
                _require_not_replaced(bucket, parameter, own_hooks=0)
                view.add_(parameter.grad)
            elif parameter._post_accumulate_grad_hooks:
                _require_taken(bucket, parameter, ())
            parameter.grad = view


def _require_taken(bucket: GradBucket, parameter: Tensor, arrived: Sequence[Tensor]) -> None:
    """Raise unless a parameter without a gradient came twice, and was taken in at first, or it may be deferred."""
    if queue_of(parameter) is None and sum(one is parameter for one in arrived) < 2:
        raise MisfitError(
            f"a weight of stage {bucket.stage}, {tuple(parameter.shape)}, has lost its gradient in the backward that "
            "made it, as by a hook that sets .grad to None; the engine adds gradients up until its optimizer steps: "
            "remove that hook (register_post_accumulate_grad_hook), or change gradients by register_hook"
        )


def _require_not_replaced(bucket: GradBucket, parameter: Tensor, own_hooks: int) -> None:
    """Raise where a user's hook may have put another tensor in place of the sum of a parameter's gradients."""
    if len(parameter._post_accumulate_grad_hooks or ()) > own_hooks:
        raise MisfitError(
            f"a hook on a weight of stage {bucket.stage}, {tuple(parameter.shape)}, replaces its .grad, which is the "
            "sum over the microbatches so far: change it in place, or use register_hook, which gets each gradient alone"
        )
