"""Checks that what is replicated is the same on all ranks of a group.

Two ways to get a silently wrong tensor-parallel run: ranks that start from different replicated parameters, and a
replicated parameter that works on a cut tensor (a norm of the queries, say), whose gradient is then but one
of the partial sums.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError

from ...comm import Group, ReduceOp
from ...objects.spaces import hooks_on
from ...objects.user_code import is_ours
from .cuts import is_replaced, join
from .shard import shard_of

_PARAMETER_TOLERANCE = 1e-9
_GRADIENT_TOLERANCE = 1e-2


def require_same(named: Mapping[str, Tensor], group: Group) -> None:
    """Check that tensors have the same norms on all members; those on the meta device are not looked at.

    Raises:
        MisfitError: some differ; names the first of them. All members raise together.
    """
    names = [name for name, tensor in named.items() if not tensor.is_meta and tensor.is_floating_point()]
    if group.size == 1 or not names:
        return
    odd = _differing([named[name] for name in names], group, _PARAMETER_TOLERANCE)
    if odd:
        raise MisfitError(
            f"{len(odd)} of {len(names)} parameters differ between the ranks {list(group.ranks)}, first "
            f"{names[odd[0]]!r}; seed all ranks alike or load the same checkpoint before cutting"
        )


def watch_gradient(param: Tensor, name: str, group: Group, rules: Mapping[str, str]) -> None:
    """Check at the first backward that the gradient of a replicated parameter is the same on all members.

    The backward raises MisfitError where it is not, with the rules that keep the layers around it whole.
    """

    def check(grad: Tensor) -> None:
        handle.remove()
        if _differing([grad], group, _GRADIENT_TOLERANCE):
            raise MisfitError(
                f"the gradient of {name!r} differs between the ranks {list(group.ranks)}: this replicated parameter "
                f"works on a cut tensor; keep the layers around it whole: rules={rules}"
            )

    handle = param.register_hook(check)


def _differing(tensors: list[Tensor], group: Group, tolerance: float) -> list[int]:
    """Return which tensors' norms differ by more than `tolerance` of the greatest."""
    norms = [torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64).to(group.device) for tensor in tensors]
    high = torch.stack(norms).nan_to_num()
    low = high.clone()
    for work in (group.all_reduce(high, ReduceOp.MAX), group.all_reduce(low, ReduceOp.MIN)):
        work.wait()
    return torch.nonzero(high - low > tolerance * high).flatten().tolist()


class CutLayers:
    """The layers of which this rank has shards, as they were cut: what a loop does to one would be lost."""

    def __init__(self) -> None:
        self.layers: list[tuple[str, nn.Module, type, Set[str]]] = []
        self._weights: list[tuple[str, nn.Parameter]] = []

    def add(self, block: nn.Module, path: str) -> None:
        """Take note of those of a block."""
        for name, module in block.named_modules(prefix=path):
            weights = [(join(name, key), p) for key, p in module._parameters.items() if p is not None and shard_of(p)]
            self._weights += weights
            self.layers += [(name, module, type(module), frozenset(vars(module)))] if weights else []

    def require_as_cut(self, names: Collection[str]) -> None:
        """Raise `MisfitError` where a loop set hooks on weights, or a forward, class or what code `names` on layers."""
        for name, weight in self._weights:
            if not all(map(is_ours, hooks_on(weight))):
                _refuse(f"a hook was registered on the weight {name!r}")
        for name, layer, kind, known in self.layers:
            if type(layer) is not kind:
                _refuse(f"the class of the layer {name!r} was replaced")
            if len(vars(layer)) != len(known):
                for key in vars(layer).keys() - known:
                    if hasattr(kind, key):
                        _refuse(f"{key!r} was set on the layer {name!r}")
                    if key in names:
                        what = f"{key!r}, which its block's code names, was set on the layer {name!r}"
                        raise MisfitError(f"{what}, of which a rank of tp has a shard: set it on the block")
        if self.layers and is_replaced():
            _refuse("torch's own forward of linear layers or embeddings was replaced")


def _refuse(what: str) -> None:
    raise MisfitError(
        f"{what}, of which a rank of tp has a shard: do so before the engine is built, which then keeps the layer "
        "whole; build the engine again"
    )
