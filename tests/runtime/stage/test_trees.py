"""Trees between blocks: on every schedule the numbers of one process, whatever is built; and what cannot be a tree."""

from collections import OrderedDict, UserDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Carry
from quintsched.runtime.blocks.block_builders import split_result
from quintsched.runtime.blocks.tree_spec_text import from_words, to_words
from quintsched.runtime.blocks.trees import TreeSpec, flatten, require_known, tensors_of

from ...helpers.blocks import of_kind
from ...helpers.training import check_equality

SIZE, SAMPLES, STEPS, MICROBATCHES = 4, 8, 2, 4


@dataclass(frozen=True)
class State:
    hidden: Tensor
    ids: object
    note: object = None
    doubled: object = field(init=False, default=3)


@dataclass(slots=True)
class Slots:
    a: object
    b: object = 2


class Colour(Enum):
    RED = 1


class Pair(NamedTuple):
    first: Any
    second: Any


class Morph(nn.Module):
    """Takes any tree, and returns one that is built otherwise: of fresh tensors, old ones, weights, buffers, values."""

    def __init__(self, seed: int, *, in_place: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)
        self.shift = nn.Parameter(torch.linspace(-1, 1, SIZE))
        self.register_buffer("table", torch.arange(SIZE).float())
        self.seed, self.in_place = seed, in_place

    def forward(self, given: Any, scale: float = 1.0, mask: Tensor | None = None) -> Any:
        floats = [t for t in tensors_of(given) if t.is_floating_point() and t.dim() == 2]
        others = [t for t in tensors_of(given) if not t.is_floating_point()]
        x = sum(floats[1:], start=floats[0]) / len(floats)
        if self.in_place:
            floats[0].mul_(0.5).add_(0.1)
            x = x + floats[0]
        for vector in (t for t in tensors_of(given) if t.is_floating_point() and t.dim() == 1):
            x = x + 0.1 * vector
        if mask is not None:
            x = x * mask
        y = torch.tanh(self.layer(x)) * scale
        ids = others[0] + 1 if others else (y.detach()[:, 0] > 0)
        odd: list[Any] = [
            {"y": y, "again": y, "ids": ids, "none": None, "k": 3},
            (y, [x, {"deep": ids}], ()),
            State(y, ids, (self.shift, None, "words")),
            Pair(Pair(y, 1.5), self.table),
            [y, given if isinstance(given, Tensor) else floats[0], self.shift],
            UserDict(y=y, flag=ids > 0, dtype=torch.float64),
            y,
            (y, y[:, :1] * 2, ids),
        ]
        return Random(self.seed).choice(odd)


class Last(nn.Linear):
    def __init__(self) -> None:
        super().__init__(SIZE, 3)

    def forward(self, given: Any) -> Any:
        x = next(t for t in tensors_of(given) if t.is_floating_point() and t.dim() == 2)
        return {"logits": super().forward(x.expand(-1, SIZE)), "none": None}


def loss_fn(output: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> tuple[Tensor, float]:
    return ((output["logits"] - targets["y"]) ** 2).sum(), float(len(targets["y"]))


def batch() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, SIZE, generator=random, dtype=torch.float64)
    inputs = {"x": x, "ids": torch.arange(SAMPLES), "words": "as they are", "none": None}
    mask = torch.rand(SAMPLES, 1, generator=random, dtype=torch.float64)
    targets = {"y": torch.randn(SAMPLES, 3, generator=random, dtype=torch.float64), "z": None}
    return inputs, targets, {"scale": 1.25, "mask": mask}


def check(plan: qs.Plan, blocks: Any, microbatches: int = MICROBATCHES) -> None:
    inputs, targets, extras = batch()
    if not any(issubclass(getattr(block, "func", Last), Morph) for block in blocks):
        extras = {}
    sgd = partial(torch.optim.SGD, lr=0.1)
    check_equality(plan, blocks, loss_fn, sgd, [(inputs, targets, extras)] * STEPS, microbatches=microbatches)


PLANS: list[tuple[str, dict[str, Any]]] = [
    ("1f1b", {"mesh": "pp=4"}),
    ("zb-h1", {"mesh": "pp=3"}),
    ("interleaved-1f1b", {"mesh": "pp=2", "chunks": 2}),
    ("dualpipev", {"mesh": "pp=2"}),
    ("1f1b", {"mesh": "pp=2", "recompute": 1}),
    ("1f1b", {"mesh": "pp=1", "recompute": 2}),
    ("1f1b", {"mesh": "pp=2", "offload": 1}),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "shape"), PLANS, ids=str)
def test_odd_trees_give_the_numbers_of_one_process(name: str, shape: dict[str, Any]) -> None:
    for seed in range(3):
        random = Random(seed)
        in_place = [False, seed == 1, False, seed == 2]
        blocks = [*(partial(Morph, random.randrange(1000), in_place=changes) for changes in in_place), Last]
        check(qs.compile(name, microbatches=MICROBATCHES, **shape), blocks)


sharing = of_kind(nn.Linear, lambda self, given: (y := nn.Linear.forward(self, given["x"]), y.view(-1)))
Shares = partial(sharing, SIZE, SIZE)
"""A layer that returns a tensor beside a view of it."""
Changes = of_kind(nn.Module, lambda self, given: given[0].add_(1) + given[1].view_as(given[0]))


def test_what_shares_memory_with_something_changed_is_refused() -> None:
    plan = qs.compile("1f1b", mesh="pp=2", microbatches=2)
    words = r"block 1 \(Sequential\) changes what it is given at 0 in place, and with it 1"
    with pytest.raises(qs.MisfitError, match=words):
        check(plan, [Shares, lambda: nn.Sequential(Changes(), Last())])
    check(plan, [lambda: nn.Sequential(Shares(), Changes()), Last], 2)


class ChangesMask(Morph):
    def forward(self, given: Any, scale: float = 1.0, mask: Tensor | None = None) -> Any:
        mask.mul_(0.5)
        return super().forward(given, scale, mask)


def test_an_extra_that_is_changed_in_place_is_refused_where_another_stage_takes_it() -> None:
    blocks = [partial(ChangesMask, 6), partial(Morph, 6), Last]
    with pytest.raises(qs.MisfitError, match=r"changes 'mask' in place, an extra that block 1 takes.*mask.clone"):
        check(qs.compile("1f1b", mesh="pp=2", microbatches=4, stages=[1, 2]), blocks)
    for recompute in (0, 1):
        check(qs.compile("1f1b", mesh="pp=2", microbatches=4, stages=[2, 1], recompute=recompute), blocks)


class Losing(nn.Linear):
    """A pair, whose second is no loss; and a loss beside a dict."""

    def __init__(self, *, is_pair: bool) -> None:
        super().__init__(SIZE, SIZE)
        self.is_pair = is_pair

    def forward(self, given: Any) -> Any:
        y = super().forward(tensors_of(given)[0])
        return Carry((y, y.mean())) if self.is_pair else ({"y": y, "k": None}, (y**2).sum())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_pair", [True, False])
def test_a_pair_and_a_loss_are_told_apart(is_pair: bool) -> None:
    blocks = [partial(Losing, is_pair=is_pair), partial(Losing, is_pair=is_pair), Last]
    check(qs.compile("1f1b", mesh="pp=3", microbatches=MICROBATCHES), blocks)


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
