"""Checks that what is replicated is the same on all ranks of a group.

Two ways to get a silently wrong tensor-parallel run: ranks that start from different replicated parameters, and a
replicated parameter that works on a cut tensor (a norm of the queries, say), whose gradient is then but one
of the partial sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError

from ...comm import Group, ReduceOp
from .cuts import join
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


def shards_of(block: nn.Module, path: str) -> list[tuple[str, nn.Parameter]]:
    """Return the weights of a block, named `path`, of which this rank has a shard."""
    return [(join(path, name), p) for name, p in block.named_parameters() if shard_of(p) is not None]


def require_no_hooks(shards: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise `MisfitError` where a user registered a hook on a weight of which ranks have shards."""
    name = next((name for name, parameter in shards if _has_users_hook(parameter)), None)
    if name is not None:
        raise MisfitError(
            f"a hook was registered on the weight {name!r}, of which a rank of tp has a shard: register it before the "
            "engine is built, which then keeps the layer whole; build the engine again"
        )


def _has_users_hook(parameter: nn.Parameter) -> bool:
    held = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    hooks = (getattr(hook, "func", hook) for hooks in held for hook in (hooks or {}).values())
    return any(not str(getattr(hook, "__module__", "")).startswith("quintsched.") for hook in hooks)
