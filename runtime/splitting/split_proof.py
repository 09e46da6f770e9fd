"""Proof of a split: the whole model and the chain of its blocks compute the same from a small input.

in evaluation             outputs, gradients of weights and of inputs
in training, user code    the same, and the buffers afterwards; unless random numbers were drawn
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from quintsched.errors import MisfitError, QuintschedError, counted

from ..blocks.block_builders import accepted_extras, split_result
from ..blocks.without_side_effects import untouched
from ..comm.random_generators import AllGenerators
from ..user_objects.library_or_user import is_of_library
from ..user_objects.tensor_distances import off
from .layer_dataflow import is_number
from .weightless_model import by_place_or_name

SPLIT_TOLERANCE = 1e-5
"""Tolerance relative to the largest number; the same operations run, so rounding hardly differs."""

_ROUNDING, _MOST, _LEAST = 1e3, 0.05, 1e-6
"""Tolerances of gradients, whose sums may be in another order: multiples of eps, an upper limit, and a zero level."""

_ADVICE = (
    "its forward does more between its layers than can be found by running it (an iterator that moves, a hook, asking "
    "for x.requires_grad, a write through .data or under no_grad): do it within a layer, name other blocks, "
    "split(model, blocks=[…]), or write them by hand"
)


@dataclass
class _Result:
    """Result of a run of a model, or of a chain of blocks.

    Attributes:
        outputs: copies of its tensors.
        gradients: by the model's name of a weight or an input: weighted sum of the gradient, and its norm; None:
            the outputs have no gradient.
        buffers: the model's buffers after the run.
        has_drawn: whether it has drawn random numbers.
        changed: the ids of objects of the model that it has changed.
    """

    outputs: list[Any]
    gradients: dict[str, tuple[float, float]] | None
    buffers: dict[str, Tensor]
    has_drawn: bool
    changed: set[int]


def require_equal(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    inputs: Mapping[str, Any],
    select: Callable[[Any], Any],
    own_names: Mapping[str, str],
) -> set[int]:
    """Raise `MisfitError` unless the chain of blocks computes what the model does; all state is restored.

    Returns the ids of objects that a training run of the model changes.

    `own_names` maps "<block>.<name in the block>" to the model's own name of a weight.
    """
    first = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    known = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    weights = [(known[name], p) for name, p in model.named_parameters()]
    copies = [
        (first.get(id(p)) or known.get(own_names.get(f"{number}.{name}", ""), f"{number}.{name}"), p)
        for number, block in enumerate(blocks)
        for name, p in block.named_parameters()
    ]
    changed = set[int]()
    for training in (False,) if is_of_library(type(model)) else (False, True):
        result_of = partial(_result_of, [model, *blocks], inputs, training=training)
        expected = result_of(lambda given: select(_run(model, given)), weights)
        changed |= expected.changed
        _require_tree(type(model).__name__, expected.outputs)
        if training and expected.has_drawn:
            continue
        try:
            found = result_of(lambda given: chain(blocks, given), copies)
        except Exception as error:
            if isinstance(error, QuintschedError):
                raise
            said = f"{type(error).__name__}: {error}".partition("\n")[0]
            name = type(model).__name__
            raise MisfitError(f"the blocks of {name} do not run, and the model does ({said}); {_ADVICE}") from error
        _compare(type(model).__name__, expected, found)
    return changed


def _require_tree(what: str, leaves: Sequence[Any]) -> None:
    """Raise `MisfitError` for an output with objects that are not searched for tensors."""
    other = next((leaf for leaf in leaves if not isinstance(leaf, Tensor | str | bool | int | float | None)), None)
    if other is not None:
        raise MisfitError(
            f"the forward of {what} returns a {type(other).__name__}; return tensors, or tuples, lists, dicts of them "
            "(dataclasses.asdict)"
        )


def _result_of(
    modules: Sequence[nn.Module],
    inputs: Mapping[str, Any],
    run: Callable[[Any], Any],
    weights: Sequence[tuple[str, nn.Parameter]] = (),
    *,
    training: bool = False,
) -> _Result:
    """Return the result of a run, each from the same state of modules, the model first, and of generators."""
    with untouched(nn.ModuleList(modules)) as kept, torch.enable_grad():
        for module in modules:
            module.train(training)
        sums, generators = _Sums(weights), AllGenerators()
        outputs = tree_flatten(run(sums.entered(inputs)))[0]
        has_drawn = generators.have_moved()
        changes = [c for c in kept.snapshot.changes() if c.owner.startswith(".0") and c.place[1] != "training"]
        buffers = {name: buffer.clone() for name, buffer in modules[0].named_buffers()}
        copied = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in outputs]
        return _Result(copied, sums.of_outputs(outputs), buffers, has_drawn, {change.place[0] for change in changes})


class _Sums:
    """Weighted sums over gradients, of one weight at a time: no two gradients are held at once.

    Args:
        weights: with the model's names; several may be one.
    """

    def __init__(self, weights: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._leaves: list[tuple[str, Tensor]] = [(name, weight) for name, weight in weights if weight.requires_grad]
        self._found: dict[str, tuple[float, float]] = {}

    def entered(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return copies of the inputs, as leaves that require gradients where they are floating point."""

        def enter(name: str, given: Any) -> Any:
            if not isinstance(given, Tensor):
                return given
            leaf = given.detach().clone()
            if given.is_floating_point():
                self._leaves.append((f"input {name}", leaf.requires_grad_()))
            return leaf.clone()

        return {name: tree_map(partial(enter, name), given) for name, given in inputs.items()}

    def of_outputs(self, outputs: Sequence[Any]) -> dict[str, tuple[float, float]] | None:
        """Return the sums for a run's outputs; None where these have no gradients."""
        numbers = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
        leaves = [(name, leaf) for name, leaf in self._leaves if leaf.requires_grad]  # a forward may freeze its own
        before = [leaf.grad for _, leaf in leaves]
        hooks = [self._watched(name, leaf) for name, leaf in leaves]
        try:
            torch.autograd.backward([_sum(number) for number in numbers]) if numbers else None
        except RuntimeError:  # no gradient, or backward not possible twice
            return None
        finally:
            for (_, leaf), gradient, hook in zip(leaves, before, hooks, strict=True):
                leaf.grad = gradient
                hook.remove()
        return self._found

    def _watched(self, name: str, leaf: Tensor) -> Any:
        leaf.grad = None

        def note(leaf: Tensor) -> None:
            if leaf.grad is not None:
                total, norm = self._found.get(name, (0.0, 0.0))
                gradient = leaf.grad.to_dense() if leaf.grad.is_sparse else leaf.grad
                self._found[name] = (
                    total + float(_sum(gradient.abs() if gradient.is_complex() else gradient)),
                    math.hypot(norm, float(gradient.norm())),
                )
            leaf.grad = None

        return leaf.register_post_accumulate_grad_hook(note)


def _sum(numbers: Tensor) -> Tensor:
    """Return a weighted sum of the elements, so that permuted elements differ."""
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers)
    flat = numbers.reshape(-1, numbers.shape[-1]) if numbers.dim() else numbers.reshape(1, 1)
    flat = flat.float() if flat.dtype.itemsize < 4 else flat
    rows, columns = (torch.arange(n, dtype=flat.dtype, device=flat.device).add(1).sin() for n in flat.shape)
    return rows @ (flat @ columns)


def _compare(what: str, expected: _Result, found: _Result) -> None:
    """Raise `MisfitError` where two runs differ."""
    if len(expected.outputs) != len(found.outputs):
        raise MisfitError(
            f"the blocks of {what} give {counted(len(found.outputs), 'tensor')}, and the model {len(expected.outputs)}"
        )
    for number, (one, other) in enumerate(zip(expected.outputs, found.outputs, strict=True)):
        apart = _off(one, other)
        if apart == inf and is_number(one) and is_number(other) and one.shape == other.shape:
            who = "the model" if not bool(one.isfinite().all()) else "the chain of blocks"
            raise MisfitError(
                f"{what} cannot be compared with its blocks: tensor {number} of the output of {who} has numbers that "
                "are not finite, for a small example; give one of its own, split(model, example=…), or leave the "
                "comparison out, prove=False"
            )
        if apart > SPLIT_TOLERANCE:
            raise MisfitError(
                f"the blocks of {what} do not give what the model gives: off by {apart:.1g} of its largest number; "
                f"{_ADVICE}"
            )
    for name, one in expected.buffers.items():
        if not torch.equal(one.nan_to_num(), found.buffers[name].nan_to_num()):
            raise MisfitError(
                f"the blocks of {what} leave other numbers in its buffer {name!r} than the model does; {_ADVICE}"
            )
    if expected.gradients is not None:
        _compare_gradients(what, expected.gradients, found.gradients or {}, expected.outputs)


def _compare_gradients(
    what: str, expected: Mapping[str, tuple[float, float]], found: Mapping[str, tuple[float, float]], outputs: Any
) -> None:
    precision = max((torch.finfo(o.dtype).eps for o in outputs if is_number(o)), default=0.0)
    nothing = _LEAST * max((norm for _, norm in (*expected.values(), *found.values())), default=0.0)
    for name in [*expected, *(name for name in found if name not in expected)]:
        (one, its_norm), (other, norm) = expected.get(name, (0.0, 0.0)), found.get(name, (0.0, 0.0))
        apart = abs(one - other) / max(its_norm, norm, nothing, 1e-30)
        if apart > min(_MOST, _ROUNDING * precision):
            raise MisfitError(
                f"the blocks of {what} do not give {name!r} the gradient that it has in the model: off by {apart:.1g} "
                f"of it; {_ADVICE}"
            )


def require_equal_loss(
    model: nn.Module, blocks: Sequence[nn.Module], inputs: Mapping[str, Any], loss_fn: Callable[..., Any] | None
) -> None:
    """Raise `MisfitError` unless the loss of the blocks equals the model's own; the ids are the labels."""
    assert loss_fn is not None
    labels = next(iter(inputs.values()))
    modules = [model, *blocks]
    (own,) = _result_of(modules, inputs, lambda given: _run(model, {**given, "labels": labels})["loss"]).outputs
    total, weight = _result_of(modules, inputs, lambda given: loss_fn(chain(blocks, given), labels)).outputs
    if _off(own, (total / weight).to(own.dtype)) > SPLIT_TOLERANCE:
        raise MisfitError(
            f"the loss of {type(model).__name__} is not that of its logits and its routers; set "
            "config.output_router_logits = False"
        )


def _run(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    try:
        args, kwargs = by_place_or_name(model, inputs)
        return model(*args, **kwargs)
    except Exception as error:
        raise MisfitError(f"{type(model).__name__} does not run by itself, before it is split: {error}") from error


def chain(blocks: Sequence[nn.Module], given: Any) -> Any:
    """Run blocks one after the other, passing riders along."""
    riders: dict[str, Tensor] = {}
    for block in blocks:
        accepts = accepted_extras(block)
        given, fresh, _ = split_result(block(given, **{n: r for n, r in riders.items() if accepts(n)}))
        riders |= fresh
    return given


def _off(expected: Any, found: Any) -> float:
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        return off(found, expected)
    return inf if isinstance(expected, Tensor) or isinstance(found, Tensor) or expected != found else 0.0
