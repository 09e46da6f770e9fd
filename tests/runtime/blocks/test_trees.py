"""Trees: taken apart and put together again, compared, told to other ranks, and what cannot be."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime.blocks.block_builders import Carry, split_result
from quintsched.runtime.blocks.shape_inference import trace_shapes
from quintsched.runtime.blocks.tree_spec_text import from_words, to_words
from quintsched.runtime.blocks.trees import TensorSpec, Tree, TreeSpec, flatten, merged, require_known

from ..toys import tiny_vit


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


def test_what_is_built_otherwise_differs() -> None:
    assert flatten({"a": X})[0] != flatten({"b": X})[0]
    assert flatten((X, 1))[0] != flatten((X, True))[0]
    assert flatten((X, 1))[0] != flatten([X, 1])[0]
    assert flatten((X, 1))[0].is_built_as(flatten((Y, 2))[0])
    assert not flatten((X, 1))[0].is_built_as(flatten((X, Y))[0])
    assert flatten({"a": [X, State(X)]})[0].paths == ["['a'][0]", "['a'][1].hidden"]
    assert str(TreeSpec.from_tree({"a": X, "b": None})) == "dict(a: tensor, b: None) (['a']: float32 (2, 3))"


def test_values_that_differ_are_kept_apart() -> None:
    trees = [flatten({"x": X, "k": k, "n": None})[0] for k in (1, 2)]
    together = merged(trees)
    assert isinstance(together, Tree)
    assert together.build([X]) == {"x": X, "k": (1, 2), "n": None}
    assert merged([flatten((X,))[0], flatten([X])[0]]) is None


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


def test_what_transformers_gives_is_a_tree() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    given = outputs.BaseModelOutputWithPast(last_hidden_state=X, hidden_states=(X, X))
    shape, tensors = flatten(given)
    again = shape.build(tensors)
    assert isinstance(again, outputs.BaseModelOutputWithPast)
    assert again.last_hidden_state is X
    assert again.past_key_values is None
    assert list(again) == list(given)
    assert from_words(to_words(TreeSpec.from_tree(given))) == TreeSpec.from_tree(given)


# Shapes, as found on the meta device.


def test_shapes_are_found_without_data_or_memory() -> None:
    parcels = trace_shapes(tiny_vit(), TreeSpec.plain(TensorSpec((2, 1, 8, 8), torch.float64)), {}, torch.float64)
    specs = [parcel.output.tensors[0] for parcel in parcels]
    assert [spec.shape for spec in specs] == [(2, 17, 16)] * 5 + [(2, 10)]
    assert {spec.dtype for spec in specs} == {torch.float64}
    huge = [lambda: nn.Linear(10**6, 10**6, bias=False)]
    (left,) = trace_shapes(huge, TreeSpec.plain(TensorSpec((10**6, 10**6), torch.float32)), {})
    assert left.output.tensors[0].shape == (10**6, 10**6)


class Noisy(nn.Linear):
    """Makes a tensor where torch makes them by itself."""

    def forward(self, x):
        return super().forward(x + torch.rand(4, dtype=x.dtype) * torch.arange(4))


def test_blocks_that_make_tensors_without_a_device_have_shapes() -> None:
    spec, blocks = TreeSpec.plain(TensorSpec((2, 4), torch.float64)), [lambda: Noisy(4, 4)] * 2
    assert [str(parcel.output) for parcel in trace_shapes(blocks, spec, {}, torch.float64)] == ["float64 (2, 4)"] * 2
