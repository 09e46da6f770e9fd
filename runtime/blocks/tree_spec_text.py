"""Serialisation of tree specs as JSON text, for ranks that do not have the tree itself.

    {"ids": (2, 8) int64, "mask": None}   ◀──▶   [["dict", ["ids", "mask"], [0, ["value", null]]], [["int64", [2, 8]]]]

A class is written as its module and qualified name, and imported where the text is read: all ranks run one program.
"""

from __future__ import annotations

import json
from enum import Enum
from importlib import import_module
from typing import Any

import torch

from quintsched.errors import MisfitError

from .trees import Branch, Leaf, Node, TensorSlot, TensorSpec, Tree, TreeSpec

_BUILT_IN = {kind.__name__: kind for kind in (tuple, list, dict)}
_TENSOR = 0


def to_words(spec: TreeSpec) -> str:
    """Serialise a spec; raises `MisfitError` for values and classes that another rank could not restore."""
    tensors = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in spec.tensors]
    return json.dumps([_node_words(spec.tree.root), tensors])


def from_words(text: str) -> TreeSpec:
    """Return the spec that `to_words` serialised; raises `MisfitError` for a class that cannot be imported."""
    root, tensors = json.loads(text)
    specs = (TensorSpec(tuple(shape), getattr(torch, dtype)) for dtype, shape in tensors)
    return TreeSpec(Tree(_node(root)), tuple(specs))


def _node_words(node: Node) -> Any:
    if node is TensorSlot.TENSOR:
        return _TENSOR
    if isinstance(node, Leaf):
        return _value_words(node.value)
    assert isinstance(node, Branch)
    return [_class_words(node.kind), [*map(_value_words, node.keys)], [*map(_node_words, node.children)]]


def _node(words: Any) -> Node:
    if words == _TENSOR:
        return TensorSlot.TENSOR
    if len(words) == 2:
        return Leaf(_value(words))
    kind, keys, children = words
    return Branch(_class(kind), tuple(map(_value, keys)), tuple(map(_node, children)))


def _value_words(value: object) -> list[Any]:
    if value is None or type(value) in (bool, int, float, str):
        return ["value", value]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, Enum):
        return [_class_words(type(value)), value.name]
    raise MisfitError(f"{value!r} in the inputs cannot be told to other ranks; give it as an extra, or as a tensor")


def _value(words: list[Any]) -> Any:
    kind, value = words
    if kind == "value":
        return value
    return getattr(torch, value) if kind == "dtype" else _class(kind)[value]


def _class_words(kind: type) -> str:
    if kind in _BUILT_IN.values():
        return kind.__name__
    if "<locals>" in kind.__qualname__:
        raise MisfitError(
            f"the inputs are a {kind.__name__}, a class inside of a function, which other ranks cannot find; define it "
            "at the top of its module"
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(words: str) -> Any:
    if words in _BUILT_IN:
        return _BUILT_IN[words]
    module, _, names = words.partition(":")
    try:
        found: Any = import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise MisfitError(f"the inputs are a {words}, which this rank cannot find: {error}") from error
    return found
