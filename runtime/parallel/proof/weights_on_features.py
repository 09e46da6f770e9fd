"""Weights that are not cut and meet only features between columns and rows: a rank has a part of their gradients.

    x ─▶ column ─▌▐─▶ features ─▶ k_norm.weight, k_norm.bias ─▶ z ─▶ row ─▌▐─▶ y       reached from z alone: a part
     ╰── norm.weight                                                                   reached from x or y: all of it

Numbers show it but where a gradient vanishes whatever is given: of a bias on all keys alike, which a softmax takes
away, rounding alone is left, and that differs from rank to rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ...settings.tensor_rules import TensorSplit
from ..tensor.choice import Choice
from ..tensor.cuts import Cut
from ..tensor.pairs import wide_norms
from .arrivals import Arrival
from .bench import Bench, Kind
from .reads.drawn_parts import undisturbed
from .trial import Setting, outputs_of


class WeightsOnFeatures(Bench):
    """Finds such weights on the ranks of tp."""

    def names_in(self, kind: Kind, arrival: Arrival, choice: Choice) -> frozenset[str]:
        """Return the names of a kind's weights that only features meet, as all ranks find (collective)."""
        setting, found = Setting(tensor=self.group, trains=True), frozenset[str]()
        try:
            twin = self._drawn(kind, setting)
            with undisturbed(self.group.device):
                found = _met_by_features(twin, self._cuts(kind, twin, choice), arrival)
        except Exception:  # it is run besides, and its error is told
            pass
        names = [name for name, _ in kind.blueprint.bare.named_parameters()]
        missing = self.most([float(name not in found) for name in names], setting)
        return frozenset(name for name, is_missing in zip(names, missing, strict=True) if not is_missing)


def _met_by_features(twin: nn.Module, cuts: Sequence[Cut], arrival: Arrival) -> frozenset[str]:
    """Return the names of weights that only features meet in a forward of a block that is whole; `cuts` are its own."""
    paired = [cut for cut in cuts if cut.is_paired]
    cut_weights = {id(parameter) for cut in paired for parameter in cut.layer.parameters()}
    scopes = {id(cut.pair): cut.pair for cut in paired if cut.pair is not None}.values()
    if all(id(parameter) in cut_weights for scope in scopes for parameter in scope.parameters()):
        return frozenset()
    features, others = list[Tensor](), list[Tensor]()
    for cut in paired:
        _part(cut.layer, others if cut.split is TensorSplit.COLUMN else features)
    for norm, _ in wide_norms(cuts):
        _part(norm, features)
    with torch.enable_grad():
        others += outputs_of(twin, arrival).values()
    met = _reached(features) - _reached(others) - cut_weights
    return frozenset(name for name, parameter in twin.named_parameters() if id(parameter) in met)


def _part(layer: nn.Module, given: list[Tensor]) -> None:
    """Note what a layer is given, and end the graph behind it."""

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        given.extend(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))

    def end(module: nn.Module, args: Any, result: Any) -> Any:
        return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result)

    layer.register_forward_pre_hook(note, with_kwargs=True)
    layer.register_forward_hook(end)


def _reached(tensors: Iterable[Tensor]) -> set[int]:
    """Return the ids of the leaves that tensors are made of."""
    found = {id(tensor) for tensor in tensors if tensor.grad_fn is None}
    open_ones, seen = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None], set[Any]()
    while open_ones:
        node = open_ones.pop()
        if node in seen:
            continue
        seen.add(node)
        found.add(id(getattr(node, "variable", None)))
        open_ones += [before for before, _ in node.next_functions if before is not None]
    return found
