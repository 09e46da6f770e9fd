"""Propagation rules: owners of an operator's results from those of its arguments; unknown operators raise `Unknown`.

pointwise      add, gelu, where, clamp, …        each element from those at its position
moving         cat, index, gather, roll, …       marks are moved as the elements
reducing       sum, norm, amax, argmax, …        one owner along the reduced dimensions
normalising    softmax, sort, layer norm, …      one owner along the normalised dimensions
products       mm, bmm, attention                one owner along the contracted dimension

Labels (`labels`), of dtype `LABEL`, follow the same rules: they are hashed together where owners must be one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

Owners = Callable[[Tensor], Tensor]
LABEL = torch.int32
"""Dtype of labels, which distinguishes them from owners (int8)."""

COUNTS = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
"""Operators whose output size shows Python a count that depends on data."""

_POINTWISE = {
    "_to_copy", "rsub", "hardswish", "hardsigmoid", "native_dropout", "prelu", "_prelu_kernel", "polar", "complex",
    "log_sigmoid_forward", "rrelu_with_noise", "rrelu_with_noise_functional", "masked_fill", "bernoulli",
}  # fmt: skip
MOVING = {
    "cat", "stack", "gather", "index", "index_select", "repeat", "roll", "flip", "constant_pad_nd", "_unsafe_view",
    "tril", "triu", "index_put", "_unsafe_index", "scatter", "index_copy", "slice_scatter", "select_scatter", "copy",
    "masked_scatter", "_reshape_copy", "expand_copy", "permute_copy", "view_copy", "unfold_copy", "clone",
    "_reshape_alias",
}  # fmt: skip
_REDUCING = {
    "sum", "nansum", "mean", "amax", "amin", "max", "min", "prod", "var", "std", "var_mean", "std_mean", "norm",
    "linalg_vector_norm", "logsumexp", "any", "all", "argmax", "argmin", "count_nonzero", "median", "nanmedian",
    "kthvalue", "mode", "aminmax",
}  # fmt: skip
_ALONG = {
    "_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort",
    "topk",
}  # fmt: skip
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "dot", "addmv", "_addmm_activation"}
_CONSTANT = {"zero", "fill", "normal", "uniform", "exponential", "random"}


class Joined(Exception):
    """Raised where features of several ranks meet in one element, or may; the message says where."""


class JoinedAt(Joined):
    """`Joined` whose message names the line of user code."""


class Unknown(Joined):
    """Raised for an operator without a rule: it is unknown whether features meet in it."""


def owners_of_results(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, of: Owners
) -> Iterable[tuple[Tensor, Tensor]]:
    """Return an operator's result tensors and mutated arguments, with the owners of their elements.

    Raises `Joined` if features of several ranks meet, and `Unknown` if there is no rule.
    """
    name, is_changing = name_of(func), func._schema.is_mutable
    given = _by_name(func, args, kwargs)
    results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    memories = {leaf.untyped_storage()._cdata for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}
    if not is_changing:
        results = [found for found in results if found.untyped_storage()._cdata not in memories]
    if not results or name.endswith("_like") or name.startswith("new_"):
        return []
    try:
        if name in _CONSTANT and is_changing:
            return [(found, torch.zeros_like(found, dtype=torch.int8)) for found in results]
        first = _first_owners(name, func, given, results, of)
    except RuntimeError as error:
        raise Unknown(f"calls {name}, of which it is not known whether features meet in it ({error})") from None
    if isinstance(first, list):
        return list(zip(results, first, strict=False))
    fitting = [(found, first) for found in results if _fits(first.shape, found.shape)]
    return [(found, owners.expand(found.shape)) for found, owners in fitting]


def name_of(func: Any) -> str:
    """Return the name of an operator, without the underscore of its in-place variant."""
    name: str = func._schema.name.removeprefix("aten::")
    return name[:-1] if func._schema.is_mutable and name.endswith("_") and not name.endswith("__") else name


def tells_numbers(func: Any) -> bool:
    """Whether an operator returns numbers or conditions on numbers to Python: `item`, `equal`, `allclose`, …"""
    return torch.Tag.data_dependent_output in func.tags


def goes_by_data(func: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether the output shape of an operator depends on data: `nonzero`, or indexing by a boolean mask.

    `tensors` are its tensor arguments; for indexing, the indices follow the indexed tensor.
    """
    is_index = "index" in func._schema.name
    return torch.Tag.dynamic_output_shape in func.tags and (
        not is_index or any(places.dtype in (torch.bool, torch.uint8) for places in tensors[1:])
    )


def _first_owners(
    name: str, func: Any, given: Mapping[str, Any], results: Sequence[Tensor], of: Owners
) -> Tensor | list[Tensor]:
    """Return the owners of an operator's first result (a tensor), or of all (a list)."""
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    if name in MOVING:
        return _moved(func, name, given, of)
    if name in ("max", "min") and len(tensors) == 2:
        return joined(name, *map(of, tensors))
    if name in _REDUCING:
        return _one(name, of(tensors[0]), given.get("dim"), keeps=bool(given.get("keepdim", False)))
    if name in _ALONG:
        along = _one(name, of(tensors[0]), given["dim"], keeps=True).expand(results[0].shape)
        return along if tensors[0].shape != along.shape else joined(name, of(tensors[0]), along)
    if name in _PRODUCTS:
        return _product(name, *map(of, tensors))
    if name in ("native_layer_norm", "_fused_rms_norm", "native_group_norm") or "batch_norm" in name:
        return _normalised(name, given, of)
    if "scaled_dot_product" in name and "backward" not in name:
        return _attended(name, given, results[0], of)
    if name == "glu":
        return joined(name, *of(tensors[0]).chunk(2, given["dim"]))
    if is_pointwise(name, func):
        return joined(name, *map(of, tensors))
    raise Unknown(f"calls {func._schema.name}, of which it is not known whether features meet in it")


def joined(name: str, *owners: Tensor) -> Tensor:
    """Combine the marks of several tensors elementwise, with broadcasting; raises `Joined` for different owners."""
    if owners[0].dtype is LABEL:
        return blended(name, *owners)
    shape = torch.broadcast_shapes(*(of_one.shape for of_one in owners))
    first, *others = (of_one.expand(shape) for of_one in owners)
    for other in others:
        if bool(((first != 0) & (other != 0) & (first != other)).any()):
            raise Joined(f"lets features of several ranks meet in {name.strip('_')}")
        first = torch.maximum(first, other)
    return first


def blended(name: str, *labels: Tensor) -> Tensor:
    """Return the labels of an elementwise operator's results: a hash of its name and its arguments' labels."""
    total = labels[0] * _FACTORS[0]
    for label in labels[1:]:
        total = (total * _FACTORS[1]) + label
    return mixed(total + (crc32(name.encode()) >> 2))


def mixed(labels: Tensor) -> Tensor:
    """Return labels scrambled by a hash finaliser, so that they have no linear relations."""
    labels = labels ^ (labels >> 15)
    labels *= _FACTORS[2]
    return labels.bitwise_xor_(labels >> 13)


_FACTORS = 0x2545F491, 0x1B873593, 0x2C1B3C6D


def _blended_along(labels: Tensor, dims: Sequence[int], *, keeps: bool) -> Tensor:
    """Reduce labels along dimensions by an order-dependent hash."""
    for dim in dims:
        size = labels.shape[dim]
        places = torch.arange(1, size + 1, dtype=LABEL, device=labels.device).mul_(_FACTORS[0]).bitwise_or_(1)
        labels = mixed(labels * places.view([size if d == dim % labels.dim() else 1 for d in range(labels.dim())]))
        labels = labels.sum(dim, keepdim=True, dtype=LABEL)
    chosen = {dim % labels.dim() for dim in dims}
    return labels if keeps else labels.reshape([size for dim, size in enumerate(labels.shape) if dim not in chosen])


def require_one(owners: Tensor, dims: Sequence[int], *, keeps: bool) -> Tensor:
    """Reduce owners along dimensions to the only one there (or 0); raises `Joined` if there are several."""
    if not owners.dim() or not dims:
        return owners
    if owners.dtype is LABEL:
        return _blended_along(owners, dims, keeps=keeps)
    if not owners.numel():
        return owners.sum(tuple(dims), keeps, dtype=torch.int8)
    if not is_one(owners, dims):
        raise Joined("lets features of several ranks meet")
    return owners.amax(tuple(dims), keeps)


def is_one(owners: Tensor, dims: Sequence[int]) -> bool:
    """Whether there is at most one owner along dimensions, everywhere."""
    if not owners.numel():
        return True
    most, least = owners.amax(tuple(dims)), owners.masked_fill(owners == 0, 127).amin(tuple(dims))
    return not bool(((most != 0) & (least != most)).any())


def _one(name: str, owners: Tensor, dims: int | Sequence[int] | None, *, keeps: bool) -> Tensor:
    chosen = [dims] if isinstance(dims, int) else list(dims or range(owners.dim()))
    try:
        return require_one(owners, chosen, keeps=keeps)
    except Joined as why:
        raise Joined(f"{why} in {name.strip('_')}") from None


def _moved(func: Any, name: str, given: Mapping[str, Any], of: Owners) -> Tensor:
    """Apply a moving operator to owners; indices must not be features, except `gather` within the same owner."""
    indices = [leaf for key in ("index", "indices", "mask") for leaf in tree_leaves(given.get(key))]
    indices = [leaf for leaf in indices if isinstance(leaf, Tensor)]
    of_indices = [of(index) for index in indices]
    if name != "gather" and any(bool(owners.any()) for owners in of_indices if owners.dtype is not LABEL):
        raise Joined(f"looks up features by features in {name}")
    places = {id(index) for index in indices}
    moved = {
        key: tree_map(lambda leaf: of(leaf) if isinstance(leaf, Tensor) and id(leaf) not in places else leaf, value)
        for key, value in given.items()
    }
    if "value" in moved and not isinstance(moved["value"], Tensor):
        moved["value"] = 0
    if name == "copy":
        source: Tensor = moved["src"]
        return source.expand(moved["self"].shape)
    function = getattr(getattr(torch.ops.aten, name), func._overloadname)
    names = [argument.name for argument in func._schema.arguments]
    owners: Tensor = function(**{key: value for key, value in moved.items() if key in names})
    if name == "gather":
        return joined(name, owners, *of_indices)
    return owners if owners.dtype is not LABEL or not indices else joined(name, owners, *map(identity, of_indices))


def _product(name: str, *owners: Tensor) -> Tensor:
    *added, first, second = owners
    last = second.dim() - 2 if second.dim() > 1 else 0
    left = _one(name, first, first.dim() - 1, keeps=True)
    right = _one(name, second, last, keeps=second.dim() > 1)
    product = joined(name, left, right)
    if second.dim() == 1:
        product = product[..., 0] if first.dim() > 1 else product.reshape(())
    return joined(name, product, *added)


def identity(labels: Tensor) -> Tensor:
    """Return one label for a whole tensor: a hash of its labels, 0-dimensional."""
    return _blended_along(labels.reshape(-1), [0], keeps=False)


def _normalised(name: str, given: Mapping[str, Any], of: Owners) -> Tensor:
    owners = of(given["input"])
    if owners.dtype is LABEL:
        beside = [leaf for key, leaf in given.items() if key != "input" and isinstance(leaf, Tensor)]
        owners = joined(name, owners, *(identity(of(leaf)) for leaf in beside))
    if given.get("training") is False:  # by running statistics
        return owners
    if "normalized_shape" in given:
        dims = list(range(owners.dim() - len(given["normalized_shape"]), owners.dim()))
    elif name == "native_group_norm":
        grouped = owners.reshape(given["N"], given["group"], -1)
        return joined(name, grouped, _one(name, grouped, 2, keeps=True)).reshape(owners.shape)
    else:
        dims = [dim for dim in range(owners.dim()) if dim != 1]
    return joined(name, owners, _one(name, owners, dims, keeps=True))


def _attended(name: str, given: Mapping[str, Any], result: Tensor, of: Owners) -> list[Tensor]:
    queries, keys, values = (of(given[key]) for key in ("query", "key", "value"))
    groups = queries.shape[1] // max(keys.shape[1], 1)
    query = _one(name, queries, 3, keeps=True)
    key = _one(name, keys, [2, 3], keeps=True).repeat_interleave(groups, 1)
    value = _one(name, values, 2, keeps=True).repeat_interleave(groups, 1)
    masks = [given[k] for k in ("attn_mask", "attn_bias") if isinstance(given.get(k), Tensor)]
    bias = [_one(name, of(mask), mask.dim() - 1, keeps=True) for mask in masks]
    return [joined(name, query, key, value, *bias).expand(result.shape)]


def is_pointwise(name: str, func: Any) -> bool:
    """Whether an operator is pointwise."""
    if name in _POINTWISE or torch.Tag.pointwise in func.tags:
        return True
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if packet is not None else []
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads)


def _by_name(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    arguments = func._schema.arguments
    known = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return known | dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)


def _fits(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    sizes = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, other) for size, other in sizes)
