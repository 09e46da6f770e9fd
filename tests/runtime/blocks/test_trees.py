"""Trees: taken apart and put together again, compared, told to other ranks, and what cannot be."""

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import quintsched as qs
from quintsched.runtime.blocks.block_builders import Carry, split_result
from quintsched.runtime.blocks.tree_spec_text import from_words, to_words
from quintsched.runtime.blocks.trees import TreeSpec, flatten, require_known


class Colour(Enum):
    RED = 1


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class State:
    hidden: Tensor
    note: object = None
    doubled: object = field(init=False, default=3)


@dataclass(slots=True)
class Slots:
    a: object
    b: object = 2


X, Y = torch.ones(2, 3), torch.zeros(4, dtype=torch.int64)

TREES = [
    X,
    (X,),
    [X, [Y], ()],
    (X, None, 1, 2.5, True, "words", torch.float32),
    {"a": X, 3: {"b": (Y, X)}},
    OrderedDict(z=X, a=Y),
    Pair(X, Pair(None, Y)),
    State(X, {"deep": [Y]}),
    Slots(X),
    UserDict(ids=Y, mask=None),
    torch.max(X, 1),
    {"colour": Colour.RED, "same": [X, X]},
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_a_tree_is_taken_apart_and_put_together_and_survives_as_text(tree: Any) -> None:
    shape, tensors = flatten(tree)
    assert len(tensors) == len(shape.paths)
    again = shape.build(tensors)
    assert type(again) is type(tree)
    other, others = flatten(again)
    assert other == shape
    assert hash(other) == hash(shape)
    assert all(one is another for one, another in zip(tensors, others, strict=True))
    assert shape.tensors_of(tree) is not None
    assert shape.tensors_of([tree, tree]) is None
    if not isinstance(tree, torch.return_types.max):
        spec = TreeSpec.from_tree(tree)
        assert from_words(to_words(spec)) == spec


def test_unknown_objects_and_local_classes_are_refused() -> None:
    with pytest.raises(qs.MisfitError, match=r"mask\['a'\] is a builtins.object; known are tensors, tuples, lists"):
        require_known("mask", flatten({"a": object()})[0])

    @dataclass
    class Local:
        x: Tensor

    with pytest.raises(qs.MisfitError, match=r"Local, a class inside of a function.*top of its module"):
        to_words(TreeSpec.from_tree(Local(X)))


def test_a_loss_beside_an_output_is_told_from_a_tuple() -> None:
    loss = torch.tensor(1.0)
    assert split_result((X, loss)) == (X, {}, loss)
    assert split_result((X, None)) == (X, {}, None)
    for output in [(X, Y), (X, loss, loss), [X, loss], Pair(X, loss), (X, torch.tensor(1)), (X, 1.0)]:
        assert split_result(output)[0] is output
    assert split_result(Carry((X, loss))) == ((X, loss), {}, None)
    assert split_result((Carry((X, Y), h=X), loss)) == ((X, Y), {"h": X}, loss)
