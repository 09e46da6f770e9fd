"""Sequences are cut over cp, or into slices, only for blocks that keep tokens of several ranks apart at all numbers."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quintsched.errors import MisfitError
from quintsched.runtime import Engine
from quintsched.runtime.comm import Group
from quintsched.runtime.parallel.context.context_parallel import Context
from quintsched.runtime.parallel.cut_proofs.block_twins import Blueprint
from quintsched.runtime.parallel.cut_proofs.tokens.prove_tokens_independent import why_tokens_meet
from quintsched.runtime.parallel.cut_proofs.trial_inputs import Arrival, GivenTree, TrialInput
from quintsched.runtime.parallel.cut_proofs.twin_runs import Setting

from ...trials import on_ranks
from .odd_blocks import TOKENS, WIDTH, Attending, Mix, Mlp
from .training import batch, loss, refusal

ONE = [batch(1, samples=1)]


def why(mix: Mix, setting: Setting, tokens: int = TOKENS) -> str:
    x = torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(0))
    return why_tokens_meet(
        Blueprint(Attending(mix)), Arrival(GivenTree([TrialInput(x, 1)])), setting, torch.device("cpu")
    )


def whole(y: Tensor, context: Context | None) -> Tensor:
    return y if context is None else context.whole(y)


def remembered(self: Any, y: Tensor, context: Context | None) -> Tensor:
    self.kept = torch.maximum(self.kept, y.detach().abs().max())
    return torch.where(self.kept > 60, y.tanh(), y)


def mixed(y: Tensor, experts: list[Callable[[Tensor], Tensor]]) -> Tensor:
    """Give each token to the expert that its first number chooses, as mixtures of transformers do."""
    tokens, found = y.flatten(0, 1), torch.zeros_like(y).flatten(0, 1)
    mask = F.one_hot((tokens[:, 0] * 3).long().clamp(0, len(experts) - 1), len(experts)).T
    for hit in mask.sum(-1).gt(0).nonzero():
        if hit[0] != len(experts):
            (chosen,) = torch.where(mask[hit[0]] > 0)
            found.index_add_(0, chosen, experts[int(hit[0])](tokens[chosen]))
    return found.view(y.shape)


CP, SLICES = Setting(context=cast("Group", SimpleNamespace(size=2))), Setting(slices=2)
JOINED: list[tuple[Mix, str]] = [
    (lambda self, y, context: y / (y.abs().amax(1, keepdim=True) / 60).clamp(min=1), "amax"),
    (lambda self, y, context: y if torch.allclose(y, y.clamp(-60, 60)) else y.tanh(), "asks for numbers of tokens in"),
    (lambda self, y, context: y.tanh() if y.abs().max().item() > 60 else y, "reads numbers of tokens on the host"),
    (lambda self, y, context: y + 1e-9 * y.cumsum(1), "cumsum"),
    (lambda self, y, context: torch.where(F.pad(y, (0, 0, 1, 0))[:, :-1] > 60, y.tanh(), y), "gt|where"),
    (lambda self, y, context: y * (100 / (y > 60).sum(1, keepdim=True).clamp(min=100)), "sum"),
    (lambda self, y, context: torch.zeros_like(y).index_add(1, torch.zeros_like(y[0, :, 0]).long(), y) * 1e-9, "index"),
    (remembered, "max"),
]
APART: list[Mix] = [
    lambda self, y, context: F.layer_norm(y, y.shape[-1:]) * (y >= y.topk(4).values[..., 3:]),
    lambda self, y, context: torch.stack([F.gelu(y[:, place]) for place in range(y.shape[1])], 1),
    lambda self, y, context: torch.zeros_like(y).index_put((y > 0,), y[y > 0]),
    lambda self, y, context: mixed(y, [torch.tanh, torch.relu, torch.sin, torch.cos]),
    lambda self, y, context: y * torch.zeros_like(y).scatter(-1, y.topk(4).indices, 1.0),
    lambda self, y, context: F.embedding(y[..., 0].gt(0).long(), self.proj.weight) + y,
]


LENGTHS: list[tuple[Mix, str]] = [
    (lambda self, y, context: y.tanh() if y.shape[1] > TOKENS // 2 else y, "calls tanh in line"),
    (lambda self, y, context: y / max(y.shape[1] / TOKENS, 0.9), "calls div 1 in line"),
    (
        lambda self, y, context: mixed(y, [torch.cos if y.shape[1] > TOKENS // 2 else torch.sin] * 4),
        "calls cos in line",
    ),
    (lambda self, y, context: y * torch.arange(y.shape[1])[:, None] if self.training else y, "a part of the tokens"),
]


def first(self: Any, y: Tensor, context: Context | None) -> Tensor:
    return torch.cat([y[:, :1] * (1 + self.kept), y[:, 1:]], 1)


BY_PLACES: list[Mix] = [
    first,
    lambda self, y, context: y + self.kept * y.tril(),
    lambda self, y, context: y.index_put(
        (torch.arange(len(y))[:, None], torch.zeros(1, 1).long()), self.kept + y[:, :1]
    ),
    lambda self, y, context: torch.where(torch.arange(y.shape[1])[:, None] == 0, y * (1 + self.kept), y),
    lambda self, y, context: torch.cat([c * (1 + self.kept * i) for i, c in enumerate(y.split(3, 1))], 1),
    lambda self, y, context: torch.cat([y[:, :1], F.dropout(y[:, 1:], 1e-7)], 1),
    lambda self, y, context: y + 0 * whole(first(self, y, context), context).mean(1, keepdim=True),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("setting", [CP, SLICES])
def test_what_joins_tokens_or_goes_by_their_number_or_places_is_found_with_its_function(setting: Setting) -> None:
    by_places = BY_PLACES[: None if setting is CP else -1]
    for mix, word in (*JOINED, *LENGTHS, *((mix, "by their places") for mix in by_places)):
        found = why(mix, setting)
        assert any(part in found for part in word.split("|")), (word, found)
        assert (mix, word) not in JOINED or " in line " in found


def test_what_goes_by_true_positions_or_by_all_places_alike_may_be_cut() -> None:
    for mix in (
        lambda self, y, context: torch.where(context.positions[:, None] == 0, y * (1 + self.kept), y),
        lambda self, y, context: y * (1 + self.kept * self.proj.bias[context.positions, None]),
        lambda self, y, context: y * (context.positions[:, None] * self.proj.bias[:, None, None]).cos().sum(0),
        lambda self, y, context: y + self.kept * y.unflatten(1, (-1, 2)).flip(2).flatten(1, 2),
    ):
        assert not why(mix, CP)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [CP, SLICES])
def test_what_keeps_tokens_apart_may_be_cut(setting: Setting) -> None:
    assert not any(why(mix, setting) for mix in APART)


def test_the_whole_of_a_context_may_be_looked_at() -> None:
    def largest(self: Any, y: Tensor, context: Context | None) -> Tensor:
        return y / (whole(y, context).abs().amax(1, keepdim=True) / 60).clamp(min=1)

    assert not why(largest, CP)
    assert "amax" in why(lambda self, y, context: largest(self, y, None), CP)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("mesh", "more", "says"),
    [
        ("cp=2", {}, r"over cp=2: .* look at all tokens by context.whole\(tensor\); or run without cp"),
        ("pp=2", {"schedule": "seq-1f1b", "slices": 2}, r"into 2 slices: .* a schedule that does not slice"),
    ],
)
def test_blocks_that_join_tokens_are_refused_on_all_ranks(mesh: str, more: dict[str, Any], says: str) -> None:
    blocks = [lambda: Attending(lambda self, y, context: y), lambda: Attending(JOINED[0][0])]
    said = refusal(mesh, blocks, ONE, microbatches=1, **more)
    assert re.search(rf"block 1 \(Attending\) may give other numbers where sequences are cut {says}", said)


def test_an_evaluation_before_the_first_step_leaves_the_proof_of_slices_to_that() -> None:
    def work(engine: Engine) -> None:
        assert engine.evaluate(*ONE[0]).loss.isfinite()
        with pytest.raises(MisfitError, match="may give other numbers where sequences are cut into 2 slices"):
            engine.step(*ONE[0])

    how: dict[str, Any] = {"schedule": "seq-1f1b", "slices": 2, "microbatches": 1, "dtype": torch.float64}
    on_ranks(work, [Attending(JOINED[0][0])], loss, mesh="pp=1", **how)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("length", "says"),
    [(4 * TOKENS, r"given float64 \(1, \d+, 16\), it "), (TOKENS, r"'block 0 \(Attending\).*' was set, and now it ")],
)
def test_what_joins_tokens_in_a_later_step_is_refused_before_it(length: int, says: str) -> None:
    def joins_later(self: Any, y: Tensor, context: Context | None) -> Tensor:
        return y + 1e-9 * y.cumsum(1) if y.shape[1] > TOKENS or hasattr(self, "hot") else y

    def change(block: Any, step: int) -> None:
        if step == 2 and length == TOKENS:
            block.hot = True

    steps = [*ONE, *ONE, batch(2, samples=1, length=length)]
    said = refusal("cp=2", [lambda: Attending(joins_later)], steps, microbatches=1, change=change)
    assert re.search(rf"cut over cp=2: {says}", said)


class Sliced(Mlp):
    """x + mlp(x), and more in training."""

    def __init__(self, more: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.more(x) if self.training else 0)


SLICED: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (lambda x: x * torch.rand_like(x[..., :1]), "it draws by rand_like for its part of the tokens in line"),
    (lambda x: x.roll(1, 1), "meet in add in line"),
    (lambda x: F.dropout(x, 1 / x.shape[1]), "calls mul_ 1.06667 in line"),
    (lambda x: torch.cat([x[:, :1] * torch.ones(()), x[:, 1:]], 1), "does to some tokens by their places"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("more", "why"), SLICED)
def test_what_joins_tokens_that_sequence_parallelism_slices_is_refused(more: Any, why: str) -> None:
    said = refusal("tp=2", [lambda: Sliced(more)], ONE, microbatches=1, sequence_parallel=True)
    assert re.search(rf"cut over tp, by sequence_parallel: .*{why} .*; run without sequence_parallel", said)
