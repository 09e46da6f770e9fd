"""Whether a block keeps tokens of several ranks apart but for what it is given to look at them: see `token_owners`.

in training, twice ─▶ tokens followed; in evaluation, without gradients, too
if x.max() > 60: …  ─▶ once more, as if it were otherwise: other outputs?
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ....blocks.blocks import seeded
from ...context.context import SequenceShard
from ..arrivals import Arrival, Given, GivenTree
from ..feature_owners import Place
from ..owner_rules import Joined
from ..trial import LOSS, Setting, Tensors, outputs_of
from ..twins import SEED, Blueprint
from .token_owners import TokenOwners, TokenReads

_MOST_CONDITIONS = 32


def why_tokens_meet(blueprint: Blueprint, arrival: Arrival, setting: Setting, device: torch.device) -> str:
    """Return why a block may give other numbers where sequences are cut so, in words; empty: it keeps tokens apart.

    Nothing is sent, and the generators are left as they were.
    """
    try:
        for trains in (True, False):
            follower = _Follower(blueprint, arrival, setting, device, trains=trains)
            outputs, conditions = follower.run(frozenset())
            for condition in list(conditions)[:_MOST_CONDITIONS]:
                follower.require_same(outputs, condition)
    except Joined as why:
        return str(why)
    return ""


class _Follower:
    """Runs a block, in a mode, as if it were given whole sequences with a context or a past."""

    def __init__(
        self, blueprint: Blueprint, arrival: Arrival, setting: Setting, device: torch.device, *, trains: bool
    ) -> None:
        self._blueprint, self._arrival, self._setting = blueprint, arrival, setting
        self._device, self._trains = device, trains

    def run(self, flipped: Set[Place]) -> tuple[Tensors, Sequence[Place]]:
        """Return what the block gives, and where Python asked for numbers of tokens; raises `Joined`."""
        owners = TokenOwners(flipped)
        twin = self._blueprint.draw(self._device).train(self._trains)
        arrival = _owned(owners, self._arrival, self._setting)
        beside = self._beside(owners)
        outputs: Tensors = {}
        mode: AbstractContextManager[object] = nullcontext() if self._trains else torch.no_grad()
        with seeded(SEED, 0, self._device), torch.enable_grad(), mode:
            for _ in range(2 if self._trains else 1):
                with TokenReads(owners), owners:
                    outputs = outputs_of(twin, arrival, beside)
                outputs.pop(LOSS, None)
                owners.require_apart(outputs)
        return {name: output.detach() for name, output in outputs.items()}, list(owners.conditions)

    def require_same(self, outputs: Tensors, condition: Place) -> None:
        """Raise `Joined` where a block gives something else if a condition on numbers of tokens is otherwise."""
        try:
            other, _ = self.run(frozenset([condition]))
        except Joined:
            raise
        except Exception:  # what no numbers lead to, or is refused by the block itself
            return
        same = outputs.keys() == other.keys() and all(_is_same(outputs[name], other[name]) for name in outputs)
        if not same:
            where = "".join(f" in line {line} of {file.rpartition('/')[2]}" for file, line in condition[:1])
            raise Joined(f"asks for numbers of tokens{where}, and does something else where they are otherwise")

    def _beside(self, owners: TokenOwners) -> dict[str, object]:
        length = _length(self._arrival)
        if self._setting.context is None:
            return {"past": owners.past(length)}
        return {"context": owners.seen(length, self._device, _owners_of(length, self._setting).to(self._device))}


def _is_same(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.allclose(first, second, 1e-4, 1e-6, equal_nan=True)


def _length(arrival: Arrival) -> int:
    """Return how many tokens a sequence has."""
    given = [*arrival.activation.parts, *arrival.riders.values()]
    return next(part.tensor.shape[part.tokens] for part in given if part.tokens is not None)


def _owners_of(length: int, setting: Setting) -> Tensor:
    """Return the rank, or slice, that has each token."""
    owners = torch.zeros(length, dtype=torch.int8)
    if setting.context is None:
        return (torch.arange(length) * setting.slices // length + 1).to(torch.int8)
    for rank in range(setting.context.size):
        owners[SequenceShard(setting.context.size, rank).positions(length)] = 1 + rank
    return owners


def _owned(owners: TokenOwners, arrival: Arrival, setting: Setting) -> Arrival:
    """Return copies of what a block is given, whose tokens have owners."""

    def own(given: Given) -> Given:
        tensor = given.tensor.clone(memory_format=torch.contiguous_format)
        if given.tokens is not None:
            vector = _owners_of(tensor.shape[given.tokens], setting).to(tensor.device)
            shape = [-1 if dim == given.tokens else 1 for dim in range(tensor.dim())]
            owners.note(tensor, vector.reshape(shape).expand(tensor.shape))
        return Given(tensor, given.tokens)

    def own_all(tree: GivenTree) -> GivenTree:
        return GivenTree([own(part) for part in tree.parts], tree.tree)

    return replace(
        arrival,
        activation=own_all(arrival.activation),
        riders={name: own(rider) for name, rider in arrival.riders.items()},
        extras={name: own_all(extra) for name, extra in arrival.extras.items()},
    )
