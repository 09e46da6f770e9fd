"""Trial runs of a twin, whole or cut, and their comparison: outputs, gradients of inputs and of weights.

whole    x ─▶ block ─▶ y                                    the same on every rank
cut      x ─▶ this rank's tokens ─▶ block, cut ─▶ y          with the context, or the KV cache, of a real run
         weight gradients that are partial sums are all-reduced
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ...autograd.slice_kv_cache import Past, Store
from ...blocks.block_builders import accepted_extras, split_result
from ...blocks.trees import flatten
from ...comm import Group
from ...user_objects.tensor_distances import largest_of, off
from ..context.context_parallel import ContextParallel
from ..tensor.parameter_shards import shard_of, take_shard
from ..tensor.sequence_parallel import partial_weights, run_on_slices
from .block_twins import SEED
from .trial_inputs import Arrival, TrialInput, cut_dimension

SMALL = 0.1
"""Gradients below this share of the largest one are compared relative to that share: they may be mere rounding."""

AUXILIARY = "auxiliary loss"
"""Name of a loss among outputs; losses of slices are summed."""

TwinTensors = dict[str, Tensor]
TwinGradients = dict[str, Tensor | None]
Slicer = Callable[[Tensor, int | None], Tensor]


@dataclass(frozen=True)
class Setting:
    """Setting of a trial run: group of tp, token slicing over it, context parallelism, and number of slices."""

    tensor: Group | None = None
    slices_tokens: bool = False
    sequences: ContextParallel | None = None
    context: Group | None = None
    slices: int = 1
    partial: frozenset[str] = frozenset()
    """Names of uncut weights whose gradients are partial sums on the ranks of `tensor`."""
    trains: bool = False
    """Whether the block is in training mode, except for dropout modules."""

    @property
    def groups(self) -> list[Group]:
        """Groups whose members run together: tp and cp, if of several ranks."""
        return [group for group in (self.tensor, self.context) if group is not None and group.size > 1]

    @property
    def cuts(self) -> int:
        """Number of parts that a sequence is cut into."""
        return self.slices * (self.context.size if self.context is not None else 1)

    def slicer(self, number: int | None) -> Slicer:
        """Return a function that takes a run's part of a tensor's tokens: this rank's, or those of slice `number`."""

        def take(tensor: Tensor, tokens: int | None) -> Tensor:
            if tokens is None:
                return tensor
            if self.sequences is not None:
                return self.sequences.shard.cut("tokens", tensor.transpose(1, tokens)).transpose(1, tokens)
            return tensor if number is None else tensor.chunk(self.slices, tokens)[number]

        return take


@dataclass(frozen=True)
class Figures:
    """Results of a run: outputs, and gradients of inputs and weights, by name; None where there is no gradient."""

    outputs: TwinTensors = field(default_factory=dict)
    of_inputs: TwinGradients = field(default_factory=dict)
    of_weights: TwinGradients = field(default_factory=dict)

    @property
    def is_finite(self) -> bool:
        """Whether all numbers are finite, so that others can be compared with them."""
        every = (*self.outputs.values(), *self.of_inputs.values(), *self.of_weights.values())
        return all(tensor is None or bool(tensor.isfinite().all()) for tensor in every)


def run_whole(block: nn.Module, arrival: Arrival) -> Figures:
    """Run forward and backward of a whole block, on whole sequences."""
    leaves, run = _run(block, None, arrival, Setting().slicer(None), {})
    outputs = _detached(run)
    _backward(run, _seeds(outputs), {}, Setting().slicer(None))
    return Figures(outputs, {name: leaf.grad for name, leaf in leaves.items()}, _weight_gradients(block))


def outputs_of(
    block: nn.Module,
    arrival: Arrival,
    beside: Mapping[str, Any] = MappingProxyType({}),
    sliced: Group | None = None,
) -> TwinTensors:
    """Return a block's outputs on whole sequences in one forward; `beside`: a context, or a past (KV cache).

    `sliced` is the group over which tokens are sliced for the block.
    """
    return _run(block, sliced, arrival, Setting().slicer(None), beside)[1]


def run_cut(block: nn.Module, arrival: Arrival, setting: Setting, whole: Figures) -> Figures:
    """Run a cut block as this rank does in a step: forwards slice by slice, backwards in reverse order."""
    sliced = setting.tensor if setting.slices_tokens else None
    store, seeds, runs = Store(), _seeds(whole.outputs), []
    for number in range(setting.slices):
        take = setting.slicer(number)
        runs.append((take, *_run(block, sliced, arrival, take, _beside(arrival, setting, store, number))))
    dims = {
        name: cut_dimension(tensor.shape, runs[0][2][name].shape, setting.cuts)
        for name, tensor in whole.outputs.items()
        if name in runs[0][2]
    }
    if setting.context is not None:  # outputs without tokens are replicated: a share of the loss each
        alike = {name for name, dim in dims.items() if dim is None and name != AUXILIARY}
        seeds = {name: seed / setting.context.size if name in alike else seed for name, seed in seeds.items()}
    for take, _, made in reversed(runs):
        _backward(made, seeds, dims, take)
    _add_up_partial(block, setting)
    inputs = arrival.tensors
    outputs = {name: _join([_detached(made)[name] for _, _, made in runs], dim) for name, dim in dims.items()}
    if AUXILIARY in outputs:
        outputs[AUXILIARY] = _sum_of_losses([_detached(made)[AUXILIARY] for _, _, made in runs], setting)
    return Figures(
        outputs,
        {n: _join_gradients([leaves[n].grad for _, leaves, _ in runs], inputs[n].tokens) for n in runs[0][1]},
        _weight_gradients(block),
    )


@dataclass(frozen=True)
class Deviation:
    """Relative difference of a tensor (to the largest number among its like): kind ("its output") and name."""

    what: str
    name: str
    off: float

    def __str__(self) -> str:
        return f"{self.what} {self.name!r}" if self.name else self.what


OF_WEIGHT = "the gradient of its weight"


def differences(
    whole: Figures, cut: Figures, block: nn.Module, arrival: Arrival, setting: Setting
) -> Iterator[Deviation]:
    """Yield the difference of each compared tensor, on this rank's part; `block` is the cut one."""
    take, inputs = setting.slicer(None), arrival.tensors
    share = setting.context.size if setting.context is not None else 1
    outputs: TwinGradients = {}
    for name, tensor in whole.outputs.items():
        found = cut.outputs.get(name)
        dim = None if found is None else cut_dimension(tensor.shape, found.shape, share)
        outputs[name] = take(tensor, dim)
    yield from _compare("its output", outputs, cut.outputs)
    yield from _compare(
        "the gradient of its input",
        {n: None if g is None else take(g, inputs[n].tokens) for n, g in whole.of_inputs.items()},
        cut.of_inputs,
    )
    parameters, weights = dict(block.named_parameters()), dict(whole.of_weights)
    for name, gradient in whole.of_weights.items():
        shard = shard_of(parameters[name])
        weights[name] = gradient if gradient is None or shard is None else take_shard(gradient, shard)
    yield from _compare(OF_WEIGHT, weights, cut.of_weights)


def shaken(arrival: Arrival, block: nn.Module) -> Arrival:
    """Perturb a block's weights in place, and return perturbed inputs, by the size of float32 rounding errors."""
    generator = torch.Generator(arrival.activation.parts[0].tensor.device).manual_seed(SEED)

    def shake(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.empty_like(tensor).uniform_(-1, 1, generator=generator)
        return tensor * (1 + 2.0**-21 * noise)

    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(shake(parameter))
    activation = arrival.activation.changed(lambda part: TrialInput(shake(part.tensor), part.tokens))
    return replace(arrival, activation=activation)


def _run(
    block: nn.Module, sliced: Group | None, arrival: Arrival, take: Slicer, beside: Mapping[str, Any]
) -> tuple[TwinTensors, TwinTensors]:
    """Run a block's forward, with tokens sliced over a group if given; return its inputs (leaf tensors) and outputs."""
    leaves = {name: take(given.tensor, given.tokens).detach().clone() for name, given in arrival.tensors.items()}
    for leaf in leaves.values():
        if leaf.is_floating_point():
            leaf.requires_grad_()
    copies = {name: leaf.clone() for name, leaf in leaves.items()}  # a block may change its inputs in place
    tree = arrival.activation.tree
    activation = tree.build([copies.pop(path) for path in tree.paths])
    extras = {
        name: given.build(lambda part: take(part.tensor, part.tokens).clone()) for name, given in arrival.extras.items()
    }
    accepts = accepted_extras(block)
    taken = {name: extra for name, extra in {**extras, **copies, **beside}.items() if accepts(name)}
    output, riders, auxiliary = split_result(copy_context().run(run_on_slices, block, sliced, activation, taken))
    left, tensors = flatten(output)
    outputs = {**dict(zip(left.paths, tensors, strict=True)), **riders}
    return leaves, {**outputs, **({} if auxiliary is None else {AUXILIARY: auxiliary})}


def _beside(arrival: Arrival, setting: Setting, store: Store, number: int) -> dict[str, Any]:
    """Return the extra arguments of cut sequences: `context` for cp, `past` for slices."""
    if setting.sequences is not None and arrival.inputs is not None:
        return {"context": setting.sequences.context_of(arrival.inputs)}
    if setting.slices == 1:
        return {}
    parts = sorted(arrival.activation.parts, key=lambda part: (part.tokens is None, part.tensor.dim() < 2))
    tokens = parts[0].tokens
    length = parts[0].tensor.shape[1 if tokens is None else tokens]
    return {"past": Past(store, number, setting.slices, length // setting.slices)}


def _seeds(outputs: TwinTensors) -> TwinTensors:
    """Return random gradients of the outputs, from a fixed seed; 1 for a 0-dimensional output (a loss)."""
    generator = torch.Generator().manual_seed(SEED)
    return {
        name: torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype).to(tensor.device)
        if tensor.dim()
        else torch.ones_like(tensor)
        for name, tensor in outputs.items()
        if tensor.is_floating_point()
    }


def _backward(made: TwinTensors, seeds: TwinTensors, dims: Mapping[str, int | None], take: Slicer) -> None:
    total: Tensor | None = None
    for name, seed in seeds.items():
        output = made.get(name)
        if output is not None and output.requires_grad:
            mine = take(seed, dims.get(name))
            if mine.shape == output.shape:
                part = (output.nan_to_num(0, 0, 0) * mine).sum()
                total = part if total is None else total + part
    if total is not None:
        total.backward()


def _add_up_partial(block: nn.Module, setting: Setting) -> None:
    """All-reduce weight gradients over the ranks that have partial sums."""
    partial = {p for name, p in block.named_parameters() if name in setting.partial}
    partial |= partial_weights(block) if setting.slices_tokens else set()
    for parameter in block.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad = parameter.grad.contiguous()
        if setting.tensor is not None and parameter in partial:
            setting.tensor.all_reduce(gradient).wait()
        if setting.context is not None:
            setting.context.all_reduce(gradient).wait()


def _weight_gradients(block: nn.Module) -> TwinGradients:
    return {name: parameter.grad for name, parameter in block.named_parameters() if parameter.requires_grad}


def _detached(made: TwinTensors) -> TwinTensors:
    return {name: tensor.detach() for name, tensor in made.items()}


def _join(parts: Sequence[Tensor], dim: int | None) -> Tensor:
    return parts[0] if len(parts) == 1 or dim is None else torch.cat(list(parts), dim)


def _sum_of_losses(losses: Sequence[Tensor], setting: Setting) -> Tensor:
    total = torch.stack(list(losses)).sum(0)
    if setting.context is not None:
        setting.context.all_reduce(total).wait()
    return total


def _join_gradients(parts: Sequence[Tensor | None], dim: int | None) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return _join(there, dim) if len(there) == len(parts) else None


def _compare(what: str, expected: TwinGradients, found: Mapping[str, Tensor | None]) -> Iterator[Deviation]:
    """Yield the relative difference of each tensor; 1.0 if it is missing on one side and not zero on the other."""
    largest = max((largest_of(tensor) for tensor in expected.values() if tensor is not None), default=0.0)
    for name, wanted in expected.items():
        got = found.get(name)
        if wanted is None or got is None:
            there = wanted if got is None else got
            apart = 0.0 if there is None or not there.any() else 1.0
        else:
            apart = off(got, wanted, SMALL * largest)
        yield Deviation(what, name, apart)
