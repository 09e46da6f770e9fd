"""Skips of the plan, past the stages between: bit for bit what riders through all stages give, and one process.

Losses on several stages too: their sum, and the gradients, are those of one process.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.ir.instruction_set import OffloadAct
from quintsched.passes.place_offloads import least_cap
from quintsched.runtime import Carry
from quintsched.runtime.comm import Rules

from ...helpers.blocks import of_kind, of_layers
from ...helpers.training import (
    Outcome,
    random_batch,
    require_equal,
    require_same_bits,
    squares,
    train_alone,
    train_ranks,
)
from ..toys import sgd
from ..trials import on_ranks

SIZE, SAMPLES, STEPS = 6, 12, 2
DATA = random_batch(0, SAMPLES, SIZE)


Plain = of_layers("Plain", lambda: {"layer": nn.Linear(SIZE, SIZE)}, lambda self, x: torch.tanh(self.layer(x)))


class Source(Plain):
    """Sends what it computes along, under a name, as it is or scaled."""

    def __init__(self, name: str, scale: float) -> None:
        super().__init__()
        self.name, self.scale = name, scale

    def forward(self, x: Tensor) -> Carry:  # type: ignore[override]
        h = super().forward(x)
        return Carry(h, **{self.name: h * self.scale if self.scale != 1 else h})


TakesA = of_kind(Plain, lambda self, x, a: torch.tanh(self.layer(x) + torch.sin(a * 1.7)))
TakesB = of_kind(Plain, lambda self, x, b: torch.tanh(self.layer(x + b) * b))
TakesBoth = of_kind(Plain, lambda self, x, a, b: torch.tanh(self.layer(x + a) + a * b))


class Table(Plain):
    """Sends along what is one of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, SIZE))

    def forward(self, x: Tensor) -> Carry:  # type: ignore[override]
        return Carry(torch.tanh(self.layer(x)), a=self.table.expand_as(x))


class ChangesA(Plain):
    def forward(self, x: Tensor, a: Tensor) -> Tensor:  # type: ignore[override]
        with torch.no_grad():
            a.mul_(2) if not a.is_meta else a
        return torch.tanh(self.layer(x))


def twelve() -> list[Any]:
    """Two blocks a stage: a goes from stage 0 to 2, 3 and 5, b from 1 to 3 and 4; some stages take one twice."""
    return [
        *(partial(Source, "a", 1.0), TakesA),
        *(partial(Source, "b", 2.0), Plain),
        *(TakesA, TakesA),
        *(Plain, TakesBoth),
        *(TakesB, TakesB),
        *(TakesA, Plain),
    ]


SKIPS = {"a": (0, 2, 3, 5), "b": (1, 3, 4)}


def train(
    skips: Mapping[str, tuple[int, ...]], blocks: Sequence[Any], name: str, wire: Rules = "mailbox", **shape: Any
) -> list[Outcome]:
    """Train and evaluate; blocks are shared out evenly where the plan does not say how."""
    plan = compile_with(skips, name, **shape)
    return train_plan(plan, blocks, wire, **({} if "stages" in shape else {"block_costs": [1.0] * len(blocks)}))


def compile_with(skips: Mapping[str, tuple[int, ...]], name: str, **shape: Any) -> qs.Plan:
    return qs.compile(name, **{"microbatches": 6, "skip": skips, **shape})


def train_plan(
    plan: qs.Plan, blocks: Sequence[Any], wire: Rules = "mailbox", loss: Any = squares, data: Any = DATA, **more: Any
) -> list[Outcome]:
    more |= {"dtype": torch.float64, "evaluated": data, "wire": wire}
    return train_ranks(plan, blocks, loss, sgd, [data] * STEPS, **more)


def train_plainly(blocks: Sequence[Any]) -> Outcome:
    return train_alone(blocks, squares, sgd, [DATA] * STEPS, evaluated=DATA)


def assert_same_bits(found: Sequence[Outcome], wanted: Sequence[Outcome]) -> None:
    assert [of_rank.losses for of_rank in found] == [of_rank.losses for of_rank in wanted]
    require_same_bits(found, wanted)


SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("1f1b", {"mesh": "pp=6", "recompute": (0, 1, 2, 1, 0, 2)}),
    ("gpipe", {"mesh": "pp=6"}),
    ("interleaved-1f1b", {"mesh": "pp=2", "chunks": 3}),
    ("zbv", {"mesh": "pp=3,dp=2", "zero": 2}),
    ("dualpipe-v", {"mesh": "pp=3", "overlap": True}),
    ("interleaved-1f1b", {"mesh": "dp=2,pp=3", "chunks": 2, "zero": 3}),
]
"""Several blocks on a stage, some of which take one skip twice: the toys of test_mutants have one block each."""


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("skips", "name", "shape"),
    [
        *((SKIPS, *shape) for shape in SHAPES),
        ({"a": (0, 2, 3), "b": (0, 3)}, "1f1b", {"mesh": "pp=4", "stages": (3, 0, 4, 5)}),
        ({"a": (0, 1, 2), "b": (0, 2)}, "1f1b", {"mesh": "pp=4", "stages": (3, 4, 5, 0)}),
    ],
)
def test_a_skip_gives_the_bits_of_a_rider_and_the_numbers_of_one_process(skips, name, shape):
    cached = train(skips, twelve(), name, **shape)
    assert_same_bits(cached, train({}, twelve(), name, **shape))
    require_equal(cached, train_plainly(twelve()))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("skips", "name", "shape"),
    [({}, "zbv", {}), ({"a": (0, 3)}, "zbv", {}), ({"a": (0, 3)}, "gpipe", {"stage_to_pp": (0, 0, 0, 1)})],
)
def test_a_weight_that_goes_along_is_not_that_of_the_stage(skips: Any, name: str, shape: dict[str, Any]) -> None:
    """Under ZeRO-3 the stage's full weights are freed before others have taken it."""
    blocks = [Table, Plain, Plain, TakesA]
    found = train(skips, blocks, name, mesh="dp=2,pp=2", zero=3, microbatches=3, **shape)
    require_equal(found, train_plainly(blocks))


SIX: dict[str, Any] = {"name": "interleaved-1f1b", "mesh": "pp=2", "chunks": 3}
ONE, TWO = {"name": "1f1b", "mesh": "pp=1"}, {"name": "1f1b", "mesh": "pp=2"}
SOURCE = partial(Source, "a", 1.0)
CHANGES, UNUSED = [SOURCE, ChangesA, Plain, TakesA], [SOURCE, TakesA, Plain, Plain]


@pytest.mark.parametrize(
    ("skips", "blocks", "shape", "words"),
    [
        ({"a": (0, 2, 5), "b": (1, 3, 4)}, twelve(), SIX, "stage 0 makes it and stages 2, 3, 5 .* --skip a=0,2,3,5"),
        (SKIPS | {"b": (0, 3, 4)}, twelve(), SIX, "stage 1 makes it and stages 3, 4 take it: .* --skip b=1,3,4"),
        ({"c": (0, 3)}, twelve(), SIX, "the plan has a skip 'c', but no block sends a tensor of that name along"),
        ({"a": (0, 1)}, UNUSED, TWO, "no other stage takes it: compile the plan without this skip"),
        ({"a": (0, 1, 3)}, CHANGES, TWO | {"name": "zbv"}, r"stage 1 changes 'a' in place, .* change a.clone\(\)"),
        ({}, [SOURCE, Plain], ONE, "block 0 sends 'a' along, and no later block takes it"),
        ({}, [SOURCE, SOURCE, TakesA], ONE, "something else of that name"),
    ],
)
def test_riders_and_skips_that_do_not_fit_are_refused(skips: Any, blocks: list[Any], shape: Any, words: str) -> None:
    with pytest.raises(qs.MisfitError, match=words):
        train(skips, blocks, **shape)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("wire", ["mailbox", "nccl"])
@pytest.mark.parametrize(("name", "shape"), [SHAPES[1], SHAPES[2]])
def test_what_takes_skips_may_go_to_the_host(name: str, shape: dict[str, Any], wire: Rules) -> None:
    """A skip that is handed on stays on the device, whatever of its taker goes away."""
    stays = compile_with(SKIPS, name, **shape)
    goes = compile_with(SKIPS, name, **shape, offload=least_cap(stays))
    assert any(isinstance(i, OffloadAct) for program in goes.programs for i in program)
    found, wanted = (train_plan(plan, twelve(), wire, block_costs=[1.0] * 12) for plan in (goes, stays))
    assert_same_bits(found, wanted)


CLASSES = 5
LABELS = torch.randint(0, CLASSES, (SAMPLES,), generator=torch.Generator().manual_seed(0))
LABELS[4] = -100


def summed(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy, and how many samples count."""
    return nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"), (targets >= 0).sum()


class Exit(nn.Linear):
    """An early exit: a head of its own, and its loss beside what goes on."""

    def __init__(self, share: float) -> None:
        super().__init__(SIZE, CLASSES)
        self.share = share

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return x, summed(super().forward(x), targets)[0] * self.share


Last = of_kind(nn.Linear, lambda self, x, early: nn.Linear.forward(self, x + early))
"""The last head, which looks at an early output as well."""
SENDS, LAST = partial(Source, "early", 1.0), partial(Last, SIZE, CLASSES)
EXITS = [SENDS, Plain, Plain, partial(Exit, 0.3), partial(Exit, 0.7), Plain, Plain, LAST]
"""Two blocks for each of four stages, or four for each of two; exits on stages 1 and 2, or on both."""


def train_exits(name: str, blocks: Sequence[Any] = EXITS, **shape: Any) -> list[Outcome]:
    plan, costs = qs.compile(name, **{"microbatches": 6, **shape}), [1.0] * len(blocks)
    return train_plan(plan, blocks, loss=summed, data=(DATA[0], LABELS), block_costs=costs)


OF_FOUR: dict[str, Any] = {"losses": (1, 2, 3), "skip": {"early": (0, 3)}}
OF_TWO: dict[str, Any] = {"losses": (0, 1), "skip": {"early": (0, 1)}}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("interleaved-1f1b", {"mesh": "pp=2", **OF_FOUR}),
        ("zbv", {"mesh": "pp=2", **OF_FOUR, "recompute": (0, 2, 1, 0)}),
        ("1f1b", {"mesh": "dp=2,pp=4", **OF_FOUR, "zero": 3}),
        ("1f1b", {"mesh": "pp=2,tp=2", **OF_TWO}),
        ("1f1b", {"mesh": "pp=1"}),
    ],
)
def test_losses_on_several_stages_equal_one_process(name: str, shape: dict[str, Any]) -> None:
    data = DATA[0], LABELS
    require_equal(train_exits(name, **shape), train_alone(EXITS, summed, sgd, [data] * STEPS, evaluated=data))


Wrong = of_kind(Plain, lambda self, x: Carry(x, targets=x))


@pytest.mark.parametrize(
    ("shape", "blocks", "words"),
    [
        ({"mesh": "pp=4"}, EXITS, "no loss there: compile it with --losses 1,2,3"),
        ({"mesh": "pp=4", "losses": (0, 1, 2, 3)}, EXITS, "a loss on stage 0, but none of its 2 blocks returns one"),
        ({"mesh": "pp=1"}, [Wrong, Plain], "block 0 sends 'targets' along, but there is something else of that name"),
    ],
)
def test_losses_that_are_not_where_the_plan_has_them_are_refused(shape: Any, blocks: list[Any], words: str) -> None:
    with pytest.raises(qs.MisfitError, match=words):
        train_exits("1f1b", blocks, **shape)


class Remembers(nn.Linear):
    """A layer that adds the first input it has seen, which it keeps."""

    first = None

    def forward(self, x: Tensor) -> Tensor:
        self.first = x if self.first is None else self.first
        return super().forward(x) + self.first.detach()


@pytest.mark.parametrize(("call", "offload"), [("step", None), ("step", 1), ("evaluate", None)])
def test_an_input_that_a_block_keeps_stays_as_it_was(call: str, offload: int | None) -> None:
    batches, blocks = torch.randn(3, 8, 4), [nn.Linear(4, 4), Remembers(4, 4)]

    def losses(mesh: str, **more: Any) -> list[list[float]]:
        work = lambda engine: [getattr(engine, call)(x, x).loss.item() for x in batches]  # noqa: E731
        return on_ranks(work, blocks, mesh=mesh, schedule="gpipe", microbatches=4, **more)

    assert losses("pp=2", offload=offload) == [pytest.approx(losses("pp=1")[0])] * 2
