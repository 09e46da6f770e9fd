"""Losses that are means: what their mean is over is found out, so that the mean over the batch is that of all of it.

    microbatch 0    targets 3 4 – –    mean 2.0      sum 4.0, weight 2 ─┐
    microbatch 1    targets 1 7 5 2    mean 1.0      sum 4.0, weight 4 ─┴▶ 8.0 / 6     not (2.0 + 1.0) / 2

A loss function of torch's whose reduction is "mean" is run with the reduction "sum", and its weight is what torch would
divide by: targets that are not ignored, their classes' weights, or elements. So it is where a loss function of the
user's ends with one, or with a sum divided by a number, and where the loss was found by a block that ends with one and
is only handed on. Any other bare loss weighs as much as its microbatch has samples; if a mean over something else is a
part of it, that is said once. So it is where blocks have auxiliary losses, which are added to the loss of each
microbatch as it is.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..blocks.trees import map_tensors
from ..blocks.untouched import Kept

_logger = logging.getLogger(__name__)

Found = Any
"""What a loss function gives: a loss, or (sum, weight)."""

_SHORT = (torch.bfloat16, torch.float16)
_MEAN = 1
"""What `reduction="mean"` is called in autograd's nodes."""


class Mean(NamedTuple):
    """A mean that torch gave, and what it is the quotient of; `is_uneven` says that it is not over all elements."""

    value: Tensor
    total: Tensor
    weight: Tensor | float
    is_uneven: bool


def _elements(given: Mapping[str, Any]) -> tuple[Tensor | float, bool]:
    first, target = list(given.values())[:2]
    shape = first.shape
    if shape != target.shape:
        shape = torch.broadcast_shapes(shape, target.shape)
    return float(shape.numel()), False


def _weighted_elements(given: Mapping[str, Any]) -> tuple[Tensor | float, bool]:
    weight = given["weight"]
    return _elements(given) if weight is None else (weight.detach().sum(), True)


def _classes(given: Mapping[str, Any]) -> tuple[Tensor | float, bool]:
    """Weigh by targets that are not ignored, or by their classes' weights."""
    target, weight = given["target"], given["weight"]
    if target.is_floating_point():  # probabilities of classes
        return float(target.numel() / max(target.shape[min(target.dim() - 1, 1)], 1)), weight is not None
    kept = target != given["ignore_index"]
    if weight is None:
        return kept.sum(), True
    return torch.where(kept, weight.detach()[torch.where(kept, target, 0)], 0.0).sum(), True


def _divergence(given: Mapping[str, Any]) -> tuple[Tensor | float, bool]:
    return (float(len(given["input"])), False) if given["reduction"] == "batchmean" else _elements(given)


def _rows(given: Mapping[str, Any]) -> tuple[Tensor | float, bool]:
    """Weigh by samples: the loss of each is a mean or a sum over classes."""
    first = next(iter(given.values()))
    return float(first.numel() / max(first.shape[-1], 1)), False


class _Rule(NamedTuple):
    """How a loss of torch's is weighed; `signature` says by which names it is given what."""

    weigh: Callable[[Mapping[str, Any]], tuple[Tensor | float, bool]]
    signature: inspect.Signature


_WEIGHED: dict[Any, _Rule] = {
    loss: _Rule(weigh, inspect.signature(loss))
    for weigh, losses in (
        (_classes, (F.cross_entropy, F.nll_loss)),
        (_weighted_elements, (F.mse_loss, F.l1_loss)),
        (
            _elements,
            (
                F.binary_cross_entropy,
                F.binary_cross_entropy_with_logits,
                F.smooth_l1_loss,
                F.huber_loss,
                F.soft_margin_loss,
                F.poisson_nll_loss,
                F.gaussian_nll_loss,
                F.hinge_embedding_loss,
            ),
        ),
        (_divergence, (F.kl_div,)),
        (_rows, (F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss)),
    )
    for loss in losses
}


class Means(TorchFunctionMode):
    """While it is entered, torch's losses whose reduction is a mean are run as sums, and noted; they give the mean.

    Attributes:
        latest: what was noted last.
        uneven: whether any was a mean over something else than samples or elements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.latest: Mean | None = None
        self.uneven = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        rule = _WEIGHED.get(func)
        if rule is None:
            return func(*args, **(kwargs or {}))
        bound = rule.signature.bind(*args, **(kwargs or {}))
        bound.apply_defaults()
        given = bound.arguments
        old_words = given.get("size_average") is not None or given.get("reduce") is not None
        if old_words or given["reduction"] not in ("mean", "batchmean"):
            return func(*args, **(kwargs or {}))
        weight, is_uneven = rule.weigh(given)
        total = func(**{**given, **_at_least_float32(given), "reduction": "sum"})
        mean = Mean(total / weight, total, weight, is_uneven)
        self.latest, self.uneven = mean, self.uneven or is_uneven
        return mean.value

    def weighed(self, loss: Found) -> Found:
        """Return (sum, weight) of a loss that is the latest mean; None where it is not."""
        return None if self.latest is None or loss is not self.latest.value else (self.latest.total, self.latest.weight)


def _at_least_float32(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the arguments that are too short to add up many losses in, longer."""
    return {name: value.float() for name, value in given.items() if isinstance(value, Tensor) and value.dtype in _SHORT}


class WeighedLoss:
    """A loss function of the user's, whose mean, if it gives one, is told apart into sum and weight where it can be.

    Called as the loss function is; gives what it gives, or (sum, weight).

    Args:
        loss_fn: the user's.
        tells_apart: whether means are told apart; else they are only warned of.

    Attributes:
        watches_blocks: whether it may be blocks that find the mean, which are to run within `means`.
        is_bare: whether some loss had no weight.
    """

    def __init__(self, loss_fn: Callable[..., Found], *, tells_apart: bool) -> None:
        self._loss_fn, self._tells_apart = loss_fn, tells_apart
        self._is_watched, self._is_told, self._is_checked = True, False, False
        self.watches_blocks, self.is_bare = True, False
        self.means = Means()
        self._divides: bool | None = None
        """Whether the loss is a sum divided by something, which only a graph shows; None: not known yet."""

    def __call__(self, output: Any, targets: Any) -> Found:
        """Return the loss of a microbatch, or its sum and weight."""
        evaluates = not torch.is_grad_enabled() and self._divides is not False
        found = self._evaluate(output, targets) if evaluates else self._find(output, targets)
        self.is_bare = self.is_bare or not isinstance(found, tuple)
        return found

    def _evaluate(self, output: Any, targets: Any) -> Found:
        """Return the same where nobody needs gradients, by a graph all the same."""
        with torch.enable_grad():
            leaves = map_tensors(lambda t: t.detach().requires_grad_() if t.is_floating_point() else t, output)
            found = self._find(leaves, targets)
        if isinstance(found, tuple):
            return tuple(part.detach() if isinstance(part, Tensor) else part for part in found)
        return found.detach() if isinstance(found, Tensor) else found

    def _find(self, output: Any, targets: Any) -> Found:
        if not self._is_watched:
            return self._with_graph(self._loss_fn(output, targets))
        means, self.means = self.means, Means()
        before = None if self._is_checked else self._kept(output)
        with means:
            found = self._loss_fn(output, targets)
        if not isinstance(found, Tensor):
            self._is_watched = self.watches_blocks = False
            return found
        if means.latest is not None and before is not None and not self._is_alike(output, targets, found, before):
            return self._with_graph(self._loss_fn(output, targets))
        weighed = means.weighed(found) if self._tells_apart else None
        if weighed is not None:
            self.watches_blocks = not isinstance(output, Tensor)
            return weighed
        weighed = self._with_graph(found)
        if weighed is found and means.uneven:
            self._tell()
        self._is_watched = means.latest is not None and not self._is_told
        self.watches_blocks = not isinstance(output, Tensor) and self.watches_blocks
        return weighed

    def _kept(self, output: Any) -> Kept:
        """Return where the loss is now: a module's state, and the generators that it may draw from."""
        module = self._loss_fn if isinstance(self._loss_fn, nn.Module) else nn.Module()
        return Kept(module, output.device if isinstance(output, Tensor) else None)

    def _is_alike(self, output: Any, targets: Any, found: Tensor, before: Kept) -> bool:
        """Whether a loss is the same when nobody watches: some of torch's lose an argument on the way to a mode.

        To see that it begins where it was before, and draws the same; it is as if that had not been. Where it is not
        the same, nothing is watched any more, and it is still as before.
        """
        self._is_checked = True
        after = self._kept(output)
        before.put_back()
        with torch.no_grad():
            plain = self._loss_fn(output, targets)
        near = 1e-2 if plain.dtype in _SHORT else 1e-4
        is_close = torch.isclose(found.detach().double(), plain.double(), rtol=near, atol=1e-6)
        if (is_close | ~plain.isfinite()).item():  # a short type may not hold the plain one's sum
            after.put_back()
            return True
        before.put_back()
        self._is_watched = self.watches_blocks = False
        self._tell()
        return False

    def _with_graph(self, found: Found) -> Found:
        """Return the sum and the weight of a mean as autograd remembers it; what was found, where it does not."""
        node: Any = found.grad_fn if self._tells_apart and isinstance(found, Tensor) else None
        if node is None:
            return found
        divisor = _divisor_of_a_sum(node)
        self._divides = divisor is not None
        if divisor is not None:
            return found * divisor, divisor
        if getattr(node, "_saved_total_weight", None) is None:
            return found
        if getattr(node, "_saved_reduction", None) != _MEAN:
            return found
        weight = node._saved_total_weight
        return torch.where(weight == 0, 0.0, found.to(torch.promote_types(found.dtype, torch.float32)) * weight), weight

    def _tell(self) -> None:
        self._is_told = True
        _logger.warning(
            "the loss function returns one number, made of a mean in which some targets are ignored or weigh more than "
            "others: each microbatch then weighs as much as it has samples, and the mean over the batch is another "
            'one than in one process; return (sum, weight), such as F.cross_entropy(…, reduction="sum"), '
            "(targets != -100).sum()"
        )


def _divisor_of_a_sum(node: Any) -> Tensor | None:
    """Return what a sum is divided by, as in `(losses * mask).sum() / mask.sum()`; None where it is not so."""
    inputs = [function for function, _ in node.next_functions]
    if node.name() != "DivBackward0" or inputs[0] is None or any(function is not None for function in inputs[1:]):
        return None
    divisor = node._saved_other if inputs[0].name() == "SumBackward0" else None
    return divisor if isinstance(divisor, Tensor) and divisor.dim() == 0 else None
