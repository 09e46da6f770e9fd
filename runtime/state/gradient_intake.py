"""Intake of gradients that a backward has left in `.grad`: added to their views, by one call for a bucket's.

arrived   [p9 p8 p7]     .grad a view already                     nothing: autograd has added in place
                         .grad new                                added to its view
                         .grad None: deferred, or come twice      nothing; taken away by a hook: refused
in place  .grad is no view: user code has taken it in a step      put back, after adding what came instead
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quintsched.errors import MisfitError

from ..autograd.deferred_weight_grads import queue_of
from ..blocks.dtensor import local_gradient
from .grad_buckets import GradBucket


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
