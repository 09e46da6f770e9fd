"""The proof of a split: the whole model and the chain of its blocks give the same numbers for a small input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from quintsched.errors import MisfitError

from ..blocks.blocks import accepted_extras, split_result
from ..blocks.untouched import run_alone, untouched

TOLERANCE = 1e-5
"""Of the largest number; the same operations run, so there is no rounding to speak of."""


def require_equal(
    model: nn.Module, blocks: Sequence[nn.Module], inputs: Mapping[str, Any], select: Callable[[Any], Any]
) -> None:
    """Raise `MisfitError` unless the blocks, one after the other, give what the model gives; both stay as they are."""
    runs = (lambda given: select(_run(model, given)), lambda given: chain(blocks, given))
    whole, chained = (_tried(run, [model, *blocks], inputs) for run in runs)
    expected, found = tree_flatten(whole)[0], tree_flatten(chained)[0]
    if len(expected) != len(found):
        raise MisfitError(
            f"the blocks of {type(model).__name__} give {len(found)} tensors, and the model {len(expected)}"
        )
    for one, other in zip(expected, found, strict=True):
        off = _off(one, other)
        if not off <= TOLERANCE:
            raise MisfitError(
                f"the blocks of {type(model).__name__} do not give what the model gives: off by {off:.1g} of its "
                "largest number; its forward does more between its layers than can be found by running it: name other "
                "blocks, split(model, blocks=[…]), or write them by hand"
            )


def require_equal_loss(
    model: nn.Module, blocks: Sequence[nn.Module], inputs: Mapping[str, Any], loss_fn: Callable[..., Any] | None
) -> None:
    """Raise `MisfitError` unless the loss that goes with the blocks is the model's own; the ids are the labels."""
    assert loss_fn is not None
    labels = next(iter(inputs.values()))
    own = _tried(lambda given: _run(model, {**given, "labels": labels})["loss"], [model, *blocks], inputs)
    total, weight = _tried(lambda given: loss_fn(chain(blocks, given), labels), [model, *blocks], inputs)
    if not _off(own, (total / weight).to(own.dtype)) <= TOLERANCE:
        raise MisfitError(
            f"the loss of {type(model).__name__} is not that of its logits and its routers; set "
            "config.output_router_logits = False"
        )


def _tried(run: Callable[[Any], Any], modules: Sequence[nn.Module], inputs: Mapping[str, Any]) -> Any:
    """Return what a run of the inputs gives: from the same state of modules and generators each time."""
    with untouched(nn.ModuleList(modules)):
        for module in modules:
            module.eval()
        return run_alone(lambda given: tree_map(_copied, run(tree_map(_copied, given))), dict(inputs))[0]


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _run(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    try:
        return model(**inputs)
    except Exception as error:
        raise MisfitError(f"{type(model).__name__} does not run by itself, before it is split: {error}") from error


def chain(blocks: Sequence[nn.Module], given: Any) -> Any:
    """Run blocks one after the other, with what rides along."""
    riders: dict[str, Tensor] = {}
    for block in blocks:
        accepts = accepted_extras(block)
        given, fresh, _ = split_result(block(given, **{n: r for n, r in riders.items() if accepts(n)}))
        riders |= fresh
    return given


def _off(expected: Any, found: Any) -> float:
    if not isinstance(expected, Tensor):
        return 0.0 if expected == found else float("inf")
    if not isinstance(found, Tensor) or expected.shape != found.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    return float((expected - found).abs().max() / max(1e-30, float(expected.abs().max())))
