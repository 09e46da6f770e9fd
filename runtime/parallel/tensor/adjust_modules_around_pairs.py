"""Adjustments around the layers of a cut pair: sizes, dropouts, norms, and the all-gather of sliced tokens.

    num_heads 8 ─▶ 4                              the module's own sizes become this rank's
    dropout between column and row                draws for this rank's features
    norm of the whole width between them          x_0 │ x_1 ─▶ gather ─▶ norm ─▶ this rank's shard
    tokens sliced outside of the module           gathered at its input, if its columns cannot do that

A pair can be parted again, before it has run: then each of its layers takes and returns full tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...blocks.block_builders import TOKENS_DIM
from ...comm import Group
from ...comm.autograd_collectives import all_gather
from ..mesh_independent_dropout import ColumnRowPair, KeyedDropout
from .column_row_layers import ColumnParallelLinear, RowParallelLinear
from .cuttable_layers import Cut, sizes_of
from .known_layer_name_pairs import divided
from .parameter_shards import shard_of

_ORIGINAL = "_quintsched_sizes"
"""Attribute in which a module keeps its original sizes, from before they were divided."""


def divide_sizes(cuts: Iterable[Cut], size: int) -> None:
    """Divide the size attributes of the modules that own cut layers (`Cut.divides`) by the number of ranks."""
    wanted = {(id(owner), name): (owner, name) for cut in cuts for owner in cut.owners for name in cut.divides}
    for owner, name in wanted.values():
        configured, dot, count = name.partition(".")
        if not hasattr(owner, configured):
            continue
        if dot:
            setattr(owner, configured, copy.copy(getattr(owner, configured)))
        holder: Any = getattr(owner, configured) if dot else owner
        before = getattr(holder, count or configured)
        owner.__dict__.setdefault(_ORIGINAL, {}).setdefault(name, before)
        setattr(holder, count or configured, divided(before, size))


def restore_sizes(owner: nn.Module) -> None:
    """Restore a module's size attributes from before they were divided."""
    for name, value in owner.__dict__.pop(_ORIGINAL, {}).items():
        configured, dot, count = name.partition(".")
        setattr(getattr(owner, configured) if dot else owner, count or configured, value)


def join_pair(scope: nn.Module, layers: Sequence[nn.Module], group: Group) -> None:
    """Connect column and row layers, and dropouts anywhere inside `scope`, by one `ColumnRowPair`."""
    pair = ColumnRowPair(group, sum(isinstance(layer, ColumnParallelLinear) for layer in layers))
    dropouts = (layer for layer in scope.modules() if isinstance(layer, KeyedDropout))
    for layer in (*layers, *dropouts):
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear | KeyedDropout):
            layer.pair = pair
    for adapted in filter(is_cut_adapter, scope.modules()):
        is_row = isinstance(adapted.base_layer, RowParallelLinear)
        for layer in adapted.get_submodule("lora_dropout").modules():
            if isinstance(layer, KeyedDropout):
                layer.pair, layer.shards = None, group if is_row and adapted.base_layer in layers else layer.shards


def is_cut_adapter(module: nn.Module) -> bool:
    """Whether a module is a LoRA adapter around a layer that is cut."""
    base = getattr(module, "base_layer", None)
    return isinstance(base, ColumnParallelLinear | RowParallelLinear) and hasattr(module, "lora_dropout")


def gather_wide_norms(cuts: Sequence[Cut], group: Group) -> None:
    """Register hooks that all-gather the features for norms over the whole width between columns and rows."""
    for module, width in wide_norms(cuts):
        module.register_forward_pre_hook(partial(_gather_features, width, group))
        module.register_forward_hook(partial(_shard_features, width, group))


def wide_norms(cuts: Sequence[Cut]) -> Iterator[tuple[nn.Module, int]]:
    """Yield the modules between columns and rows that work on the whole width (norms), each with this width.

    They are recognised by a weight (width,). Inputs that already have the whole width pass unchanged.
    """
    widths = {sizes_of(cut.layer)[1] for cut in cuts if cut.is_paired and cut.name}
    layers = {id(cut.layer) for cut in cuts}
    for scope in {id(cut.pair): cut.pair for cut in cuts if cut.is_paired}.values():
        for module in scope.modules() if scope is not None else ():
            weight = module._parameters.get("weight")
            if weight is None or weight.dim() != 1 or shard_of(weight) is not None or id(module) in layers:
                continue
            if weight.shape[0] in widths and not any(True for _ in module.children()):
                yield module, weight.shape[0]


def _gather_features(width: int, group: Group, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    x = args[0] if args else None
    if not isinstance(x, Tensor) or x.shape[-1] * group.size != width:
        return None
    module.__dict__["_quintsched_gathered"] = True
    return (all_gather(x, group, -1), *args[1:])


def _shard_features(width: int, group: Group, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    if not module.__dict__.pop("_quintsched_gathered", False):
        return None
    return output.chunk(group.size, -1)[group.index].contiguous()  # a view would keep the whole width alive


def gather_tokens_before(owner: nn.Module, layers: Sequence[nn.Module], group: Group) -> None:
    """All-gather sliced tokens once at the input of a module, instead of at each of its columns."""
    columns = [layer for layer in layers if isinstance(layer, ColumnParallelLinear)]
    for column in columns:
        column.entry = "none"
    owner.register_forward_pre_hook(partial(_gather_tokens, group, columns[0].pair), with_kwargs=True)
    for adapted in filter(is_cut_adapter, owner.modules()):
        for dropout in adapted.get_submodule("lora_dropout").modules():
            if isinstance(dropout, KeyedDropout) and adapted.base_layer in columns:
                dropout.sequence = None


def _gather_tokens(
    group: Group, pair: ColumnRowPair | None, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if pair is not None:
        pair.is_gathered = True
    if args:
        return (all_gather(args[0], group, TOKENS_DIM), *args[1:]), kwargs
    name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return args, {**kwargs, name: all_gather(kwargs[name], group, TOKENS_DIM)}


def part_pairs(block: nn.Module) -> bool:
    """Part the pairs of a block, so that each cut layer takes and returns full tensors; False if not possible."""
    layers = [m for m in block.modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear) and m.pair]
    columns = [layer for layer in layers if isinstance(layer, ColumnParallelLinear)]
    rows = [layer for layer in layers if isinstance(layer, RowParallelLinear)]
    if any(column.entry != "copy" for column in columns) or any(row.exit != "sum" for row in rows):
        return False
    for column in columns:
        column.pair, column.gather_output = None, True
    for row in rows:
        row.pair, row.input_is_parallel = None, False
    for module in block.modules():
        restore_sizes(module)
        if isinstance(module, KeyedDropout):
            module.pair = module.shards = None
    return True
