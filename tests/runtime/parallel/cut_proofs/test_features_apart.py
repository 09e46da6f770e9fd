"""Pairs are cut as pairs only where that holds at all numbers, in all modes and types, and in later steps."""

import random
import re
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.dlpack import from_dlpack, to_dlpack

from quintsched.runtime.parallel.cut_proofs import twin_test_bench
from quintsched.runtime.parallel.cut_proofs.marks.operator_rules_for_taint import goes_by_data
from quintsched.runtime.parallel.cut_proofs.marks.value_numbers_of_elements import Shadows

from ....helpers.blocks import of_kind
from .odd_blocks import TOKENS, WIDTH
from .training import Between, Seeing, refusal, verdict


def counted(self: Any, y: Tensor) -> Tensor:
    self.count += 1
    return y.softmax(-1) if self.count > 4 else F.gelu(y)


def running_max(self: Any, y: Tensor) -> Tensor:
    self.kept = torch.maximum(self.kept, y.detach().abs().max())
    return y / self.kept


def complex_norm(self: Any, y: Tensor) -> Tensor:
    turned = torch.view_as_complex(y.unflatten(-1, (-1, 2)))
    return y / (turned.abs().sum(-1, keepdim=True) / 200).clamp(min=1)


def written_in_place(self: Any, y: Tensor) -> Tensor:
    filled = torch.zeros_like(y)
    filled[..., :] = y
    return y / (filled.norm(dim=-1, keepdim=True) / 20).clamp(min=1)


def written_in_the_backward(self: Any, y: Tensor) -> Tensor:
    if y.requires_grad:
        y.register_hook(lambda gradient: setattr(self, "count", float(gradient.norm())))
    return y


GOES_BY = "goes by a size that is cut"
JOINED: list[tuple[Between, str]] = [
    (lambda self, y: y / (y.norm(dim=-1, keepdim=True) / 20).clamp(min=1), "linalg_vector_norm"),
    (lambda self, y: y.softmax(-1) if self.training else F.gelu(y), "softmax"),
    (lambda self, y: y.unflatten(-1, (-1, 8)).cummax(-2).values.flatten(-2).clamp(max=50).minimum(y), "cummax"),
    (counted, "changes 'block (Seeing).count' in its forward"),
    (running_max, "max"),
    (complex_norm, "sum"),
    (written_in_place, "linalg_vector_norm"),
    (lambda self, y: y / torch.rand(y.shape[-1], dtype=y.dtype).mean() if self.training else y, "draws by rand"),
    (written_in_the_backward, "registers a hook on features"),
    (lambda self, y: F.dropout(y, 1.6 / y.shape[-1], self.training), GOES_BY),
    (lambda self, y: y + torch.randn_like(y) * y.shape[-1] ** -0.5 if self.training else y, "draws by randn_like"),
    (
        lambda self, y: y * (2.0 if len(y[self.kept.expand(len(y)) == 0]) > 9 else 1.0),
        "has as many numbers as data decide",
    ),
]
APART: list[Between] = [
    lambda self, y: y * 2 if (self.given > 20).any() else y,
    lambda self, y: y / (y.abs().amax(1, keepdim=True) / 30).clamp(min=1),
    lambda self, y: F.normalize(y.unflatten(-1, (-1, 8)), dim=-1).flatten(-2) * (2 if self.training else y.relu()),
    lambda self, y: torch.stack((y[..., ::2], y[..., 1::2]), -1).flatten(-2).cumsum(1).tanh(),
    lambda self, y: y.masked_fill(y > 50, 0.0)[:, torch.arange(y.shape[1]).flip(0)],
]
PLACES: list[Between] = [
    lambda self, y: y * torch.arange(y.shape[-1]) if self.training else y,
    lambda self, y: torch.where(self.given.abs().max() > 9, y * torch.arange(y.shape[-1]), y),
]


def first_added_in_place(self: Any, y: Tensor) -> Tensor:
    y = F.gelu(y)
    y[..., 0] += self.kept[0]
    return y


HIDDEN: list[Between] = [
    lambda self, y: torch.cat((y[..., :4] * (1 + self.kept[0]), y[..., 4:]), -1),
    first_added_in_place,
    lambda self, y: y + self.kept[0] * y.tril(),
    lambda self, y: y * (1 + torch.cat([k.expand(y.shape[-1] // 4) for k in self.kept])),
    lambda self, y: (y.unflatten(-1, (4, -1)) * (1 + self.kept)[:, None]).flatten(-2),
    lambda self, y: y + self.kept[0] * torch.zeros_like(y).index_fill(-1, torch.tensor([0]), 1.0),
    lambda self, y: y * (1 + self.kept[0] * torch._shape_as_tensor(y)[-1]),
]
"""Operations on features by their position that do not show in numbers: the buffer is 0."""
ALIKE: list[Between] = [
    lambda self, y: (y.unflatten(-1, (-1, 4)).flip(-1) * (1 + self.kept)).flatten(-2),
    lambda self, y: y * (1 + self.kept[0] * torch.ones(y.shape[-1], dtype=y.dtype)).tanh(),
]


READS: list[Between] = [
    lambda self, y: y.softmax(-1) if (self.given.abs() > 20).any() else y,
    lambda self, y: y if torch.allclose(self.given, self.given.clamp(-20, 20)) else y.softmax(-1),
    lambda self, y: y.relu() if torch.allclose(y, y.clamp(-20, 20)) else y,
    lambda self, y: y * (1 + (from_dlpack(to_dlpack(y.detach())) > 50).any()),
]


NO_PAIR = [
    *((between, why, torch.tensor(20.0 if why == "max" else 0.0)) for between, why in JOINED),
    *((between, "", torch.zeros(4)) for between in HIDDEN),
    *((between, "", None) for between in (*PLACES, *READS)),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("between", "why", "state"), NO_PAIR)
def test_what_joins_features_or_goes_by_their_places_is_no_pair(between, why, state, caplog):
    assert verdict(between, state=state).endswith("; one by one: 0.fc1, 0.fc2")
    said = f"are cut one by one over tp, since as a pair, {why and 'it ' + why}"
    assert said in caplog.text or f" in {why} in line" in caplog.text


@pytest.mark.sampled(1)
@pytest.mark.parametrize("between", [*APART, *ALIKE])
def test_what_keeps_features_apart_wherever_they_lie_is_a_pair_and_says_so(between: Between) -> None:
    assert verdict(between, state=torch.zeros(4)).endswith("; pairs proved for all inputs: 0.fc1")


Marked = of_kind(Seeing, lambda self, x, extra: Seeing.forward(self, x, extra))
"""Wants the extra, so that nobody can try it before a batch comes."""


def where(condition: Tensor, y: Tensor) -> Tensor:
    return torch.where(condition, torch.arange(y.shape[-1], dtype=y.dtype), y)


MARKED: dict[str, tuple[Between, Tensor]] = {
    "factors": (lambda self, y: y * self.extra[:, None, : y.shape[-1]], torch.ones(4, 4 * WIDTH)),
    "a class": (lambda self, y: where(self.extra[:, None, None] == 1000, y), torch.arange(4)),
    "a class of many": (lambda self, y: where(self.extra[..., None] == -100, y), torch.arange(4 * TOKENS).view(4, -1)),
    "tokens of 0": (lambda self, y: where((self.given == 0).all(-1, keepdim=True), y), torch.ones(4)),
    "a pair": (lambda self, y: y * self.extra[..., None] * (self.given == 0).all(-1, True), torch.ones(4, TOKENS)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("what", MARKED)
def test_pairs_are_some_for_other_extras_and_with_padding(what: str, caplog: pytest.LogCaptureFixture) -> None:
    between, mark = MARKED[what]
    mark = mark.double() if mark.is_floating_point() else mark
    verdict(between, kind=Marked, extras={"extra": mark}, microbatches=1)
    assert bool(re.search("cut one by one, .* goes by a size that is cut", caplog.text)) == (what != "a pair")
    assert ("one by one" in caplog.text) == (what != "a pair")


def skipped(self: Any, y: Tensor) -> Tensor:
    return y * 0 if self.training and random.random() < 0.5 else y


def test_draws_of_python_are_no_pair_and_have_to_be_alike_on_all_ranks(caplog, monkeypatch):
    monkeypatch.setattr(twin_test_bench, "draws_of_python", lambda: (threading.get_ident(),))
    state = random.getstate()
    said = refusal("tp=2", [lambda: Seeing(skipped)], microbatches=1)
    assert re.search(r"block 0 \(Seeing\) over tp=2 draws from Python's .*: seed both alike", said)
    assert "are cut one by one over tp, since as a pair, it draws from Python's or numpy" in caplog.text
    assert random.getstate() == state


def test_numbers_at_places_are_as_many_as_these_whatever_they_are() -> None:
    mask, places = torch.ones(2, 8, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    assert not goes_by_data(torch.ops.aten.index.Tensor, [mask, places, places])
    assert goes_by_data(torch.ops.aten.index.Tensor, [places, mask])


@pytest.mark.slow
def test_what_a_block_does_for_as_many_samples_as_there_are_parts_its_pair(caplog: pytest.LogCaptureFixture) -> None:
    verdict(lambda self, y: y.softmax(-1) if len(y) == 4 else F.gelu(y), microbatches=1)
    assert "over tp=2: layers are cut one by one, since in pairs, " in caplog.text
    caplog.clear()
    verdict(lambda self, y: F.relu(y) if len(y) == 4 else F.gelu(y), microbatches=1)
    assert "one by one" not in caplog.text


def test_marks_of_an_expanded_tensor_are_those_of_the_elements_that_it_has():
    shadows, memory = Shadows(torch.int64), torch.zeros(3)
    expanded = memory[None, :, None].expand(2, -1, 4)
    shadows.set_marks(expanded, torch.arange(3)[:, None].expand(2, 3, 4))
    assert torch.equal(shadows.marks_of(expanded), torch.arange(3)[:, None].expand(2, 3, 4))
    assert torch.equal(shadows.marks_of(memory), torch.arange(3))
