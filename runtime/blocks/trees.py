"""Trees of tensors (pytrees): the inputs and outputs of blocks, and the inputs of a step.

    {"hidden": x, "mask": None, "sizes": (4, y)}        a tree
        Tree      dict(hidden: tensor, mask: None, sizes: tuple(4, tensor))      its structure, compared and hashed
        tensors   (x, y)                                                         in order; a tensor twice counts twice

Branches are tuples (named ones too), lists, dicts, `UserDict`s such as transformers' BatchEncoding, dataclasses, and
dicts that are dataclasses, as transformers' ModelOutput. All else is a leaf: a tensor, a plain value (None, a number, a
string, a dtype, …), or an opaque object.
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
    """Shape and dtype of a tensor that is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> TensorSpec:
        """Return the spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @cached_property
    def nbytes(self) -> int:
        """Size in bytes of a tensor of this spec."""
        return prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device | str) -> Tensor:
        """Return an uninitialised tensor of this spec."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


class TensorSlot(Enum):
    """Placeholder for a tensor in a tree."""

    TENSOR = "tensor"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, eq=False)
class Leaf:
    """Leaf that is no tensor. Two are equal if their values and types are; opaque values only if identical."""

    value: object

    @property
    def is_plain(self) -> bool:
        """Whether the value is a constant: None, a number, a string, ….

        An opaque object may hold tensors or mutable state.
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
    """A tuple, list, dict or dataclass; `keys` are the keys of a dict or the field names, in order."""

    kind: type
    keys: tuple[object, ...]
    children: tuple[Node, ...]

    def __str__(self) -> str:
        return f"{self.kind.__name__}({', '.join(self._items())})"

    def _items(self) -> Iterator[str]:
        if not self.keys:
            return map(str, self.children)
        return (f"{key}: {child}" for key, child in zip(self.keys, self.children, strict=True))


Node = TensorSlot | Leaf | Branch


@dataclass(frozen=True)
class Tree:
    """Structure of a tree (treedef), without its tensors."""

    root: Node

    @property
    def is_tensor(self) -> bool:
        """Whether the tree is a single tensor."""
        return self.root is TensorSlot.TENSOR

    @property
    def paths(self) -> list[str]:
        """Path of each tensor, as a Python expression after the tree's name: "['hidden']", "[1]", ".logits", ""."""
        return [path for path, node in _walk(self.root, "") if node is TensorSlot.TENSOR]

    def is_built_as(self, other: Tree) -> bool:
        """Whether another tree has the same branches, and tensors at the same paths; values of leaves may differ."""
        return merged([self, other]) is not None

    def unknown(self) -> tuple[str, object] | None:
        """Return the path and value of the first opaque object; None if there is none."""
        leaves = ((path, node) for path, node in _walk(self.root, "") if isinstance(node, Leaf))
        return next(((path, leaf.value) for path, leaf in leaves if not leaf.is_plain), None)

    def numbers(self) -> list[Number]:
        """Return the leaves that are Python numbers."""
        values = (node.value for _, node in _walk(self.root, "") if isinstance(node, Leaf))
        return [value for value in values if isinstance(value, Number)]

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """Return the tree with these tensors in its places (unflatten)."""
        return _build(self.root, iter(tensors))

    def tensors_of(self, tree: object) -> Tensors | None:
        """Return the tensors of a tree of this structure; None for a tree of another structure."""
        found, tensors = flatten(tree)
        return tensors if found == self else None

    def __str__(self) -> str:
        return str(self.root)


ONE_TENSOR = Tree(TensorSlot.TENSOR)
"""The structure of a tree that is a single tensor."""


@dataclass(frozen=True)
class TreeSpec:
    """Structure of a tree, and the specs of its tensors."""

    tree: Tree
    tensors: tuple[TensorSpec, ...]

    @classmethod
    def from_tree(cls, tree: object) -> TreeSpec:
        """Return the spec of a tree."""
        found, tensors = flatten(tree)
        return cls(found, tuple(map(TensorSpec.from_tensor, tensors)))

    @classmethod
    def plain(cls, tensor: TensorSpec) -> TreeSpec:
        """Return the spec of a tree that is a single tensor."""
        return cls(ONE_TENSOR, (tensor,))

    @property
    def samples(self) -> TensorSpec:
        """Spec that gives the numbers of samples and tokens: of the most rows, if possible with a token dimension.

        Tensors of one row may be shared by all samples, so they do not count.
        """
        return max(self.tensors, key=lambda spec: (spec.shape[:1], len(spec.shape) > 1))

    def twice(self, rows: int) -> TreeSpec:
        """Return the spec with the first dimension doubled where it is a positive multiple of `rows`."""
        has_rows = [spec.shape and spec.shape[0] and spec.shape[0] % rows == 0 for spec in self.tensors]
        pairs = zip(has_rows, self.tensors, strict=True)
        specs = [replace(spec, shape=(2 * spec.shape[0], *spec.shape[1:])) if has else spec for has, spec in pairs]
        return TreeSpec(self.tree, tuple(specs))

    def empty(self, device: torch.device | str) -> Any:
        """Return a tree of this spec with uninitialised tensors."""
        return self.tree.build([spec.empty(device) for spec in self.tensors])

    def __str__(self) -> str:
        if self.tree.is_tensor:
            return str(self.tensors[0])
        named = (f"{path}: {spec}" for path, spec in zip(self.tree.paths, self.tensors, strict=True))
        return f"{self.tree} ({', '.join(named)})"


def flatten(tree: object) -> tuple[Tree, Tensors]:
    """Return the structure of a tree, and its tensors in order."""
    if isinstance(tree, Tensor):
        return ONE_TENSOR, (tree,)
    tensors: list[Tensor] = []
    return Tree(_node(tree, tensors)), tuple(tensors)


def tensors_of(tree: object) -> Tensors:
    """Return the tensors of a tree in order."""
    return (tree,) if isinstance(tree, Tensor) else flatten(tree)[1]


def map_tensors(function: Callable[[Tensor], Tensor], tree: object) -> Any:
    """Return a tree of the same structure with a function applied to each tensor."""
    found, tensors = flatten(tree)
    return found.build([function(tensor) for tensor in tensors])


def laid_out(tensor: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """Return a tensor with these strides (0: an expanded dimension): itself or a copy. None leaves it unchanged."""
    if strides is None or tensor.stride() == strides:
        return tensor
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    once = tuple([slice(None if stride else 1) for stride in strides])
    made[once].copy_(tensor[once])
    return made


def attribute_of(tensor: Tensor) -> str | None:
    """Return the name of an attribute that code has set on a tensor, if any; those of parameters do not count."""
    names = () if isinstance(tensor, nn.Parameter) else vars(tensor)
    return next((name for name in names if not name.startswith("_dynamo")), None)


def merged(trees: Sequence[Tree]) -> Tree | None:
    """Merge trees of one structure: a leaf whose values differ becomes a tuple of all of them.

    None if the structures differ.
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
    """Raise `MisfitError` for an opaque object in a tree."""
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
        return TensorSlot.TENSOR
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
    if node is TensorSlot.TENSOR:
        return next(tensors)
    if isinstance(node, Leaf):
        return node.value
    assert isinstance(node, Branch)
    return _make(node.kind, node.keys, [_build(child, tensors) for child in node.children])


def _make(kind: Any, keys: tuple[object, ...], children: list[Any]) -> Any:
    """Return a branch of a type. A dataclass is made without its `__init__`, which may have side effects or checks."""
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
    """Yield the leaves and tensor placeholders of a tree in order, each with its path."""
    if not isinstance(node, Branch):
        yield path, node
        return
    keys = node.keys or range(len(node.children))
    has_fields = dataclasses.is_dataclass(node.kind) and not issubclass(node.kind, dict)
    for key, child in zip(keys, node.children, strict=True):
        yield from _walk(child, f"{path}.{key}" if has_fields else f"{path}[{key!r}]")
