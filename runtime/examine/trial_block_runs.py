"""Runs of blocks beside training, with an autograd graph, on inputs of experiments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..blocks.block_builders import accepted_extras, split_result
from ..blocks.trees import DIFFERENTIABLE, tensors_of
from ..comm import Group
from ..comm.random_generators import SeededGenerators
from ..parallel.cut_proofs.trial_inputs import Arrival, TrialInput
from ..parallel.mesh_independent_dropout import Masks, MaskUnit
from ..parallel.seeded_block_draws import IN_PLACE_DRAWS, BlockDraws

Sliced = Callable[[int], Group | None]
RunBlock = Callable[[int, nn.Module, Any, Mapping[str, Any]], Any]
"""Function that runs a block of this rank on its inputs."""
SameDraws = Callable[[range], AbstractContextManager[None]]
"""Function that returns a context in which a block draws the same each time for these samples."""


def anyhow(_: range) -> AbstractContextManager[None]:
    """Return a context that leaves the block's draws as they are."""
    return nullcontext()


class Ran(NamedTuple):
    """Run of a block: its input leaves and weights that require gradients; its outputs, and its loss."""

    leaves: Sequence[Tensor]
    weights: Sequence[nn.Parameter]
    made: Sequence[Tensor]
    loss: Tensor | None


class TriedBlock(NamedTuple):
    """Block that is tried on inputs: how it is run, and how it draws the same again; its weights are resident."""

    run: RunBlock
    number: int
    block: nn.Module
    alike: SameDraws = anyhow

    def __str__(self) -> str:
        """Return its number and class."""
        return f"block {self.number} ({type(self.block).__name__})"

    def run_with_graph(self, arrival: Arrival, *, records: bool = True) -> Ran:
        """Run the block, without an autograd graph unless it `records`."""
        activation, riders, taken = _leaves(self.block, arrival, records=records)
        weights = [p for p in self.block.parameters() if p.requires_grad]
        leaves = [t for t in (*tensors_of(activation), *riders.values()) if t.requires_grad]
        with torch.set_grad_enabled(records):
            output, fresh, loss = split_result(copy_context().run(self.run, self.number, self.block, activation, taken))
        made = [t for t in (*tensors_of(output), *fresh.values()) if t.requires_grad]
        return Ran(leaves, weights, made, loss)

    def floating_outputs(self, arrival: Arrival) -> list[Tensor]:
        """Run the block without an autograd graph; return its floating-point outputs."""
        activation, _, taken = _leaves(self.block, arrival, records=False)
        with torch.no_grad():
            output, fresh, _ = split_result(copy_context().run(self.run, self.number, self.block, activation, taken))
        return [t.detach().clone() for t in (*tensors_of(output), *fresh.values()) if t.is_floating_point()]


@contextmanager
def drawing(masks: Masks, number: int, block: nn.Module, samples: range, sliced: Sliced) -> Iterator[None]:
    """Context in which a block draws the same each time for these samples, on all ranks, in forward and backward."""
    unit, draws = MaskUnit(0, samples), _DrawsBySample(masks, {number: block}, sliced)
    with masks.draw_for(unit), masks.again(unit), draws.running(number):
        yield


class _DrawsBySample(BlockDraws):
    """Draws of a block made per sample, so that a sample's draws do not depend on the others in the run."""

    def _draw_keyed(self, func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]) -> Any:
        found, name, unit = super()._draw_keyed(func, args, given), func.__name__, self._masks.unit
        if found is not None or name not in _OF_SAMPLES or self._has_own_seed or unit is None:
            return found
        if name in ("rand", "randn", "randint"):
            bounds = [*(arg for arg in args if isinstance(arg, int) and name == "randint"), *_bounds(given)]
            func, args, given = getattr(torch, f"{name}_like"), (func(*args, **given), *bounds), {}
        first, samples = args[0] if args else given.get("input"), len(unit.samples)
        if not isinstance(first, Tensor) or not first.dim() or not first.shape[0] or first.shape[0] % samples:
            return None
        made, seeds = [], self._masks.sample_keys(self._next_call().site, self._masks.device).tolist()
        for place, seed in enumerate(seeds):
            own = partial(_of_sample, first, samples, place)
            with SeededGenerators(seed, self._masks.device):
                made.append(func(*map(own, args), **{key: own(value) for key, value in given.items()}))
        return first if name in IN_PLACE_DRAWS else torch.cat(made)


_OF_SAMPLES = (
    IN_PLACE_DRAWS
    | {"rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "multinomial"}
    | {"poisson", "binomial", "rrelu", "gumbel_softmax", "alpha_dropout", "feature_alpha_dropout"}
    | {"feature_dropout", "dropout1d", "dropout2d", "dropout3d"}
)


def _of_sample(first: Tensor, samples: int, place: int, given: Any) -> Any:
    """Return the rows of one sample of a tensor, if it has as many rows as `first`; else the value itself."""
    is_of_samples = isinstance(given, Tensor) and given.shape[:1] == first.shape[:1]
    return given.chunk(samples)[place] if is_of_samples else given


def _bounds(given: Mapping[str, Any]) -> list[Any]:
    return [given[name] for name in ("low", "high") if name in given]


def _leaves(
    block: nn.Module, arrival: Arrival, *, records: bool
) -> tuple[Any, Mapping[str, Tensor], Mapping[str, Any]]:
    """Return leaves of a block's inputs: its activation, riders, and all that it takes by name."""
    accepts, short = accepted_extras(block), next((p.dtype for p in block.parameters() if p.dtype.itemsize < 4), None)

    def leaf(given: TrialInput) -> Tensor:
        tensor = given.tensor.detach()
        tensor = tensor.to(short) if short is not None and tensor.is_floating_point() else tensor
        return tensor.clone().requires_grad_(records and tensor.dtype in DIFFERENTIABLE)

    activation = arrival.activation.build(leaf)
    riders = {name: leaf(rider) for name, rider in arrival.riders.items()}
    extras = {name: tree.build(lambda given: leaf(given).detach()) for name, tree in arrival.extras.items()}
    return activation, riders, {name: value for name, value in {**extras, **riders}.items() if accepts(name)}
