"""Support for modules that PyTorch has sharded: their parameters are DTensors with a local shard on each rank.

    parallelize_module over tp     ┌──────────┐ local shard ◀── optimizer (a plain parameter in the same memory)
    fully_shard over the replicas  │ DTensor  │
                                   └──────────┘ gradient ──redistributed──▶ added to the local shard's sum

Such a block is not cut again. Ranks outside its DeviceMesh start from the same weights, and its gradients are summed
over them like any others. `fully_shard` all-gathers weights inside forwards and backwards and reduces gradients over
the replicas in each backward, so they are those of the whole batch and are not summed a second time.

Sources: PyTorch's `torch.distributed.tensor.parallel` and `torch.distributed.fsdp` (FSDP2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from quintsched.errors import MisfitError

from ..comm import Group


def is_sharded(module: nn.Module) -> bool:
    """Whether some parameter of a module is a DTensor."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def local_of(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, in the same memory; any other tensor is returned unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def local_gradient(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter's gradient; partial sums are first reduced to its placements."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        with torch.no_grad():
            gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return local_of(gradient)


def full_of(tensor: DTensor) -> Tensor:
    """Return the full tensor of a DTensor: a collective, so every rank that holds a shard must call it."""
    full: Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
    return full


def comes_summed(parameter: Tensor) -> bool:
    """Whether the backward leaves a parameter's gradient already summed over the replicas (`fully_shard`)."""
    return getattr(parameter, "_quintsched_comes_summed", False)


def counts_here(parameter: DTensor) -> bool:
    """Whether this rank adds its shard to a global norm: among replicated shards, only the first rank does."""
    copies = [dim for dim, placement in enumerate(parameter.placements) if placement.is_replicate()]
    return all(parameter.device_mesh.get_local_rank(dim) == 0 for dim in copies)


def prepare_sharded(block: nn.Module, number: int, tensor: Group, replicas: Group) -> None:
    """Check that a block's DeviceMesh fits our groups, and set `fully_shard` to sum gradients instead of averaging.

    Raises `MisfitError` for DTensors over other ranks than this rank's `tensor` group, or, for `fully_shard`, its
    `replicas` group.
    """
    wrapped = [module for module in block.modules() if isinstance(module, FSDPModule)]
    summed = {parameter for module in wrapped for parameter in module.parameters()}
    named: list[tuple[str, Tensor]] = list(block.named_parameters())
    for name, parameter in named:
        if not isinstance(parameter, DTensor):
            continue
        if parameter in summed:
            _require_over(parameter, replicas, f"block {number}'s {name!r}", "fully_shard", "dp x cp x ep")
            parameter._quintsched_comes_summed = True  # type: ignore[attr-defined]
        else:
            _require_over(parameter, tensor, f"block {number}'s {name!r}", "parallelize_module", "tp")
    for module in wrapped:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_requires_gradient_sync(True)


def _require_over(parameter: DTensor, group: Group, what: str, how: str, axes: str) -> None:
    ranks = sorted(parameter.device_mesh.mesh.flatten().tolist())
    if ranks != sorted(group.ranks):
        raise MisfitError(
            f"{what} is sharded over the ranks {ranks}, but {how} has to be over {axes}, which for this rank are "
            f"{list(group.ranks)}; make its DeviceMesh of the plan's axes"
        )


def before_fully_shard(module: nn.Module, inside: bool = False) -> nn.Module:
    """Return a copy of a module as before `fully_shard`, with meta weights; without `fully_shard`, the module itself.

    Used for shape inference: the hooks of `fully_shard` all-gather weights, which would involve other ranks.
    """
    if not inside and not any(isinstance(child, FSDPModule) for child in module.modules()):
        return module
    kind = next(base for base in type(module).__mro__ if not issubclass(base, FSDPModule))
    bare: Any = object.__new__(kind)
    bare.__dict__.update(module.__dict__)
    inside = inside or isinstance(module, FSDPModule)
    bare._parameters = {name: _whole(weight) if inside else weight for name, weight in module._parameters.items()}
    bare._modules = {
        name: None if child is None else before_fully_shard(child, inside) for name, child in module._modules.items()
    }
    for hooks in ("_forward_pre_hooks", "_forward_hooks"):
        kept = {key: hook for key, hook in getattr(module, hooks).items() if not _is_fsdp(hook)}
        setattr(bare, hooks, type(getattr(module, hooks))(kept))
    made: nn.Module = bare
    return made


def _whole(weight: Tensor | None) -> Tensor | None:
    if not isinstance(weight, DTensor):
        return weight
    return nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), weight.requires_grad)


def _is_fsdp(hook: object) -> bool:
    return getattr(hook, "__module__", "").startswith("torch.distributed.fsdp")
