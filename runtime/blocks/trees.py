"""Trees of tensors: what blocks give each other, and what a step is given.

    {"hidden": x, "mask": None, "sizes": (4, y)}        a tree
        Tree      dict(hidden: tensor, mask: None, sizes: tuple(4, tensor))      how it is built, compared and hashed
        tensors   (x, y)                                                         in order; a tensor twice counts twice

Branches are tuples (named ones too), lists, dicts, `UserDict`s such as transformers' BatchEncoding, dataclasses, and
dicts that are dataclasses, as transformers' ModelOutput. All else is a leaf: a tensor, a plain value (None, a number, a
string, a dtype, …), or an object that nothing is known of.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from math import prod
from numbers import Number
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError

Tensors = tuple[Tensor, ...]

DIFFERENTIABLE = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
)

_PLAIN_VALUES = (
    NoneType,
    EllipsisType,
    Number,
    str,
    bytes,
    slice,
    range,
    frozenset,
    Enum,
    type,
    torch.Size,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that travels."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Return the spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @cached_property
    def nbytes(self) -> int:
        """How many bytes a tensor of this spec has."""
        return prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device | str) -> Tensor:
        """Return an uninitialised tensor of this spec."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


class Place(Enum):
    """Stands in a tree where a tensor is."""

    TENSOR = "tensor"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, eq=False)
class Leaf:
    """What is no tensor and no branch. Two are alike if their values are, and of one type; an array is never alike."""

    value: object

    @property
    def is_plain(self) -> bool:
        """Whether the value says all by itself: None, a number, a string, ….

        An object that nothing is known of may hold tensors, or a state of its own.
        """
        return isinstance(self.value, _PLAIN_VALUES)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Leaf) or type(self.value) is not type(other.value):
            return False
        return self.value is other.value or (self.is_plain and bool(self.value == other.value))

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __str__(self) -> str:
        return repr(self.value) if self.is_plain else f"a {type(self.value).__name__}"


@dataclass(frozen=True)
class Branch:
    """A tuple, list, dict or dataclass; `keys` are those of a dict, or the names of fields, in their order."""

    kind: type
    keys: tuple[object, ...]
    children: tuple[Node, ...]

    def __str__(self) -> str:
        return f"{self.kind.__name__}({', '.join(self._items())})"

    def _items(self) -> Iterator[str]:
        if not self.keys:
            return map(str, self.children)
        return (f"{key}: {child}" for key, child in zip(self.keys, self.children, strict=True))


Node = Place | Leaf | Branch


@dataclass(frozen=True)
class Tree:
    """How a tree is built; its tensors are elsewhere."""

    root: Node

    @property
    def is_tensor(self) -> bool:
        """Whether it is nothing but a tensor."""
        return self.root is Place.TENSOR

    @property
    def paths(self) -> list[str]:
        """Where each tensor is, as one would write it behind the tree's name: "['hidden']", "[1]", ".logits", ""."""
        return [path for path, node in _walk(self.root, "") if node is Place.TENSOR]

    def is_built_as(self, other: Tree) -> bool:
        """Whether another tree has the same branches, and tensors at the same places; plain values may differ."""
        return merged([self, other]) is not None

    def unknown(self) -> tuple[str, object] | None:
        """Return the first object that nothing is known of, with where it is; None where there is none."""
        leaves = ((path, node) for path, node in _walk(self.root, "") if isinstance(node, Leaf))
        return next(((path, leaf.value) for path, leaf in leaves if not leaf.is_plain), None)

    def numbers(self) -> list[Number]:
        """Return the numbers that are no tensors."""
        values = (node.value for _, node in _walk(self.root, "") if isinstance(node, Leaf))
        return [value for value in values if isinstance(value, Number)]

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """Return the tree with these tensors."""
        return _build(self.root, iter(tensors))

    def tensors_of(self, tree: object) -> Tensors | None:
        """Return the tensors of a tree that is built like this one; None where it is built otherwise."""
        found, tensors = flatten(tree)
        return tensors if found == self else None

    def __str__(self) -> str:
        return str(self.root)


PLAIN = Tree(Place.TENSOR)
"""The tree that is one tensor."""


@dataclass(frozen=True)
class TreeSpec:
    """How a tree is built, and the specs of its tensors."""

    tree: Tree
    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, tree: object) -> TreeSpec:
        """Return the spec of a tree."""
        found, tensors = flatten(tree)
        return cls(found, tuple(map(TensorSpec.of, tensors)))

    @classmethod
    def plain(cls, tensor: TensorSpec) -> TreeSpec:
        """Return the spec of a tree that is one tensor."""
        return cls(PLAIN, (tensor,))

    @property
    def samples(self) -> TensorSpec:
        """The tensor that says how many samples there are, and tokens: that of the most rows, with tokens if one has.

        Of one row are also tensors that are for all samples alike.
        """
        return max(self.tensors, key=lambda spec: (spec.shape[:1], len(spec.shape) > 1))

    def twice(self, rows: int) -> TreeSpec:
        """Return the spec of such a tree where there are twice as many rows of those tensors that have so many each."""
        has_rows = [spec.shape and spec.shape[0] and spec.shape[0] % rows == 0 for spec in self.tensors]
        pairs = zip(has_rows, self.tensors, strict=True)
        specs = [replace(spec, shape=(2 * spec.shape[0], *spec.shape[1:])) if has else spec for has, spec in pairs]
        return TreeSpec(self.tree, tuple(specs))

    def empty(self, device: torch.device | str) -> Any:
        """Return such a tree, with uninitialised tensors."""
        return self.tree.build([spec.empty(device) for spec in self.tensors])

    def __str__(self) -> str:
        if self.tree.is_tensor:
            return str(self.tensors[0])
        named = (f"{path}: {spec}" for path, spec in zip(self.tree.paths, self.tensors, strict=True))
        return f"{self.tree} ({', '.join(named)})"


def flatten(tree: object) -> tuple[Tree, Tensors]:
    """Return how a tree is built, and its tensors in order."""
    if isinstance(tree, Tensor):
        return PLAIN, (tree,)
    tensors: list[Tensor] = []
    return Tree(_node(tree, tensors)), tuple(tensors)


def tensors_of(tree: object) -> Tensors:
    """Return the tensors of a tree in order."""
    return (tree,) if isinstance(tree, Tensor) else flatten(tree)[1]


def map_tensors(function: Callable[[Tensor], Tensor], tree: object) -> Any:
    """Return a tree like this one, with what a function makes of its tensors."""
    found, tensors = flatten(tree)
    return found.build([function(tensor) for tensor in tensors])


def laid_out(tensor: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """Return a tensor with strides, 0 for what is repeated: itself, or a copy. None: as it is."""
    if strides is None or tensor.stride() == strides:
        return tensor
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    once = tuple([slice(None if stride else 1) for stride in strides])
    made[once].copy_(tensor[once])
    return made


def attribute_of(tensor: Tensor) -> str | None:
    """Return the name of an attribute that code has put on a tensor, if there is one; weights keep theirs."""
    names = () if isinstance(tensor, nn.Parameter) else vars(tensor)
    return next((name for name in names if not name.startswith("_dynamo")), None)


def merged(trees: Sequence[Tree]) -> Tree | None:
    """Return a tree for several that are built alike; where their values differ, it has a tuple of all of them.

    None where they are built otherwise.
    """
    root = _merged([tree.root for tree in trees])
    return None if root is None else Tree(root)


def _merged(nodes: Sequence[Node]) -> Node | None:
    first = nodes[0]
    if all(node == first for node in nodes):
        return first
    leaves = [node for node in nodes if isinstance(node, Leaf)]
    if len(leaves) == len(nodes):
        return Leaf(tuple(leaf.value for leaf in leaves))
    branches = [node for node in nodes if isinstance(node, Branch)]
    if len(branches) < len(nodes) or len({(node.kind, node.keys, len(node.children)) for node in branches}) > 1:
        return None
    children = [_merged(of_child) for of_child in zip(*(node.children for node in branches), strict=True)]
    found = [child for child in children if child is not None]
    return Branch(branches[0].kind, branches[0].keys, tuple(found)) if len(found) == len(children) else None


def require_known(name: str, tree: Tree) -> None:
    """Raise `MisfitError` for an object in a tree that nothing is known of."""
    found = tree.unknown()
    if found is not None:
        path, value = found
        raise MisfitError(
            f"{name}{path} is a {type(value).__module__}.{type(value).__qualname__}; known are tensors, tuples, lists, "
            "dicts, dataclasses, None, numbers, bools and strings"
        )


def _node(value: object, tensors: list[Tensor]) -> Node:
    if isinstance(value, Tensor):
        tensors.append(value)
        return Place.TENSOR
    found = _children(value)
    if found is None:
        return Leaf(value)
    keys, children = found
    return Branch(type(value), keys, tuple([_node(child, tensors) for child in children]))


def _children(value: object) -> tuple[tuple[object, ...], Sequence[object]] | None:
    """Return the keys and children of a branch; None for a leaf."""
    if isinstance(value, tuple | list):
        return None if isinstance(value, torch.Size) else ((), value)
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        items = fields | (value if isinstance(value, dict) else getattr(value, "__dict__", {}))
        return tuple(items), list(items.values())
    if isinstance(value, UserDict):
        value = value.data
    if isinstance(value, dict):
        return tuple(value), list(value.values())
    return None


def _build(node: Node, tensors: Iterator[Tensor]) -> Any:
    if node is Place.TENSOR:
        return next(tensors)
    if isinstance(node, Leaf):
        return node.value
    assert isinstance(node, Branch)
    return _make(node.kind, node.keys, [_build(child, tensors) for child in node.children])


def _make(kind: Any, keys: tuple[object, ...], children: list[Any]) -> Any:
    """Return a branch of a kind. A dataclass is made without its `__init__`, which may count, draw or check."""
    if kind is list:
        return children
    if issubclass(kind, tuple | list):
        return kind(*children) if hasattr(kind, "_fields") else kind(children)
    fields = getattr(kind, "__dataclass_fields__", None)
    if fields is not None and not issubclass(kind, dict):
        made: Any = object.__new__(kind)
        for name, child in zip(keys, children, strict=True):
            object.__setattr__(made, str(name), child)
        return made
    items: dict[Any, Any] = dict(zip(keys, children, strict=True))
    if kind is dict:
        return items
    if issubclass(kind, UserDict):
        return kind(items)
    made = kind(**{name: items.pop(name) for name in list(items) if name in fields}) if fields else kind.__new__(kind)
    for key, item in items.items():
        made[key] = item
    return made


def _walk(node: Node, path: str) -> Iterator[tuple[str, Node]]:
    """Yield the leaves and places of a tree in order, each with its path."""
    if not isinstance(node, Branch):
        yield path, node
        return
    keys = node.keys or range(len(node.children))
    has_fields = dataclasses.is_dataclass(node.kind) and not issubclass(node.kind, dict)
    for key, child in zip(keys, node.children, strict=True):
        yield from _walk(child, f"{path}.{key}" if has_fields else f"{path}[{key!r}]")
