"""Pairs are cut as pairs only where that holds at all numbers, in all modes and types, and in later steps."""

from __future__ import annotations

import pickle
import random
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.dlpack import from_dlpack, to_dlpack

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.engine import Engine
from quintsched.runtime.parallel.cut_proofs import compare_twins
from quintsched.runtime.parallel.cut_proofs.marks.element_labels import Shadows
from quintsched.runtime.parallel.cut_proofs.marks.owner_rules import goes_by_data

from ...toys import sgd
from .odd_mlps import TOKENS, WIDTH, Mlp

SCALES = (1.0, 30.0, 0.01)


def loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return (output - targets).square().sum(), torch.tensor(targets.numel() / WIDTH, dtype=torch.float64)


class Between(Mlp):
    """x + fc2(between(fc1(x))): what is between sees the scale of the inputs."""

    state: Any = None

    def __init__(self, between: Callable[[Any, Tensor], Tensor], state: Any = None) -> None:
        super().__init__()
        self.norm, self.function = nn.Identity(), between  # type: ignore[assignment]
        if isinstance(state, Tensor):
            self.register_buffer("kept", state.clone())
        self.count, self.config = 0, Config()

    def between(self, y: Tensor) -> Tensor:
        return self.function(self, y)


class Given(Between):
    """Code between the layers may read the block's input, too."""

    def forward(self, x: Tensor) -> Tensor:
        object.__setattr__(self, "given", x)
        result = super().forward(x)
        del self.given
        return result


class Config:
    hot = False


def train(transport: Transport, mesh: str, block: Callable[[], nn.Module], **more: Any) -> tuple[list[float], str]:
    plan = qs.compile("gpipe", mesh=mesh, microbatches=more.pop("microbatches", 2))
    dtype, extras = more.pop("dtype", torch.float64), more.pop("extras", {})
    engine = Engine(plan, [block], loss, sgd, dtype=dtype, transport=transport, **more)
    losses = []
    for step, scale in enumerate(SCALES):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(4, TOKENS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
        losses.append(float(engine.step((scale * x).to(dtype), y.to(dtype), **extras).loss))
    losses.append(float(engine.evaluate(x.to(dtype), y.to(dtype), **extras).loss))
    return losses, str(engine.tensor_cuts)


def said_of(
    between: Callable[[Any, Tensor], Tensor],
    mesh: str = "tp=2",
    state: Any = None,
    kind: type[Between] = Between,
    **more: Any,
) -> str:
    """Return what is cut, or why not; what runs has to be equal to one process."""

    def block() -> nn.Module:
        return kind(between, state)

    (alone, _), *_ = run_local(1, lambda transport: train(transport, "pp=1", block, **more))
    try:
        losses, said = run_local(qs.Mesh.parse(mesh).size, lambda transport: train(transport, mesh, block, **more))[0]
    except MisfitError as error:
        return str(error)
    assert losses == pytest.approx(alone, rel=1e-8 if "dtype" not in more else 0.05)
    return said


def counted(self: Any, y: Tensor) -> Tensor:
    self.count += 1
    return y.softmax(-1) if self.count > 4 else F.gelu(y)


def counted_in_a_buffer(self: Any, y: Tensor) -> Tensor:
    self.kept = self.kept + 1
    return torch.where(self.kept > 4, y.softmax(-1), F.gelu(y))


def running_max(self: Any, y: Tensor) -> Tensor:
    self.kept = torch.maximum(self.kept, y.detach().abs().max())
    return y / self.kept


def quantised(self: Any, y: Tensor) -> Tensor:
    most = y.detach().abs().amax(-1, keepdim=True)
    return torch.where(most > 25, y + ((y / most * 127).round() * most / 127 - y).detach(), y)


def complex_norm(self: Any, y: Tensor) -> Tensor:
    turned = torch.view_as_complex(y.unflatten(-1, (-1, 2)))
    return y / (turned.abs().sum(-1, keepdim=True) / 200).clamp(min=1)


def written_in_place(self: Any, y: Tensor) -> Tensor:
    filled = torch.zeros_like(y)
    filled[..., :] = y
    return y / (filled.norm(dim=-1, keepdim=True) / 20).clamp(min=1)


def multiplied(self: Any, y: Tensor) -> Tensor:
    return y / ((y * y) @ torch.ones(y.shape[-1], 1, dtype=y.dtype) / 400).clamp(min=1)


def written_in_the_backward(self: Any, y: Tensor) -> Tensor:
    if y.requires_grad:
        y.register_hook(lambda gradient: setattr(self, "count", float(gradient.norm())))
    return y


GOES_BY = "goes by a size that is cut"
JOINED: list[tuple[Callable[[Any, Tensor], Tensor], str]] = [
    (lambda self, y: y / (y.norm(dim=-1, keepdim=True) / 20).clamp(min=1), "linalg_vector_norm"),
    (lambda self, y: y.softmax(-1) if self.training else F.gelu(y), "softmax"),
    (lambda self, y: F.gelu(y) if torch.is_grad_enabled() else y.softmax(-1), "softmax"),
    (lambda self, y: torch.where((y.abs() > 60).any(-1, keepdim=True), y * (y >= y.topk(4).values[..., 3:]), y), "any"),
    (lambda self, y: torch.where(y.std(-1, keepdim=True) > 9, F.layer_norm(y, y.shape[-1:]), y), "std"),
    (lambda self, y: y.unflatten(-1, (-1, 8)).cummax(-2).values.flatten(-2).clamp(max=50).minimum(y), "cummax"),
    (counted, "changes 'block (Between).count' in its forward"),
    (counted_in_a_buffer, "softmax"),
    (running_max, "max"),
    (quantised, "amax"),
    (complex_norm, "sum"),
    (written_in_place, "linalg_vector_norm"),
    (multiplied, "mm"),
    (lambda self, y: y * F.normalize(torch.rand_like(y), dim=-1) if self.training else y, "draws by rand_like"),
    (lambda self, y: y / torch.rand(y.shape[-1], dtype=y.dtype).mean() if self.training else y, "draws by rand"),
    (written_in_the_backward, "registers a hook on features"),
    (lambda self, y: torch.where(self.kept * y.shape[-1] < 9, y, 0.5 * y), GOES_BY),
    (lambda self, y: F.dropout(y, 1.6 / y.shape[-1], self.training), GOES_BY),
    (lambda self, y: y + torch.randn_like(y) * y.shape[-1] ** -0.5 if self.training else y, "draws by randn_like"),
    (lambda self, y: y * torch.rand(y.shape[-1]).argsort() if self.training else y, "draws by rand"),
    (
        lambda self, y: y * (2.0 if len(y[self.kept.expand(len(y)) == 0]) > 9 else 1.0),
        "has as many numbers as data decide",
    ),
    (lambda self, y: y.roll(y.shape[-1] // 16, 1) * torch.rand(1, dtype=y.dtype) if self.training else y, GOES_BY),
]
APART: list[Callable[[Any, Tensor], Tensor]] = [
    lambda self, y: y / (y.abs().amax(1, keepdim=True) / 30).clamp(min=1),
    lambda self, y: F.normalize(y.unflatten(-1, (-1, 8)), dim=-1).flatten(-2) * (2 if self.training else y.relu()),
    lambda self, y: torch.stack((y[..., ::2], y[..., 1::2]), -1).flatten(-2).cumsum(1).tanh(),
    lambda self, y: y.masked_fill(y > 50, 0.0)[:, torch.arange(y.shape[1]).flip(0)],
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("between", "why"), JOINED)
def test_what_joins_features_at_some_numbers_is_no_pair(
    between: Callable[[Any, Tensor], Tensor], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = said_of(between, state=torch.tensor(20.0 if why == "max" else 0.0))
    assert said.endswith("; one by one: 0.fc1, 0.fc2")
    assert f"are cut one by one over tp, for as a pair, it {why}" in caplog.text or f" in {why} in line" in caplog.text


PLACES: list[Callable[[Any, Tensor], Tensor]] = [
    lambda self, y: y / y.shape[-1] ** 0.5 if self.training else y,
    lambda self, y: y * torch.arange(y.shape[-1]) if self.training else y,
    lambda self, y: y + F.relu(self.given.abs().mean() - 9) * y.shape[-1],
    lambda self, y: torch.where(self.given.abs().max() > 9, y * torch.arange(y.shape[-1]), y),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("between", PLACES)
def test_pairs_are_compared_in_training_and_with_other_inputs(between: Callable[[Any, Tensor], Tensor]) -> None:
    assert said_of(between, kind=Given).endswith("; one by one: 0.fc1, 0.fc2")


def first_added_in_place(self: Any, y: Tensor) -> Tensor:
    y = F.gelu(y)
    y[..., 0] += self.kept[0]
    return y


def first_of_chunks(self: Any, y: Tensor) -> Tensor:
    first, second = y.chunk(2, -1)
    return torch.cat((first * (1 + self.kept[0]), second), -1)


HIDDEN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "first features": lambda self, y: torch.cat((y[..., :4] * (1 + self.kept[0]), y[..., 4:]), -1),
    "added in place": first_added_in_place,
    "chunk": first_of_chunks,
    "lower triangle": lambda self, y: y + self.kept[0] * y.tril(),
    "repeated gate": lambda self, y: y * (1 + self.kept).repeat_interleave(y.shape[-1] // 4),
    "expanded gate": lambda self, y: y * (1 + self.kept)[:, None].expand(4, y.shape[-1] // 4).flatten(),
    "joined gate": lambda self, y: y * (1 + torch.cat([k.expand(y.shape[-1] // 4) for k in self.kept])),
    "groups": lambda self, y: (y.unflatten(-1, (4, -1)) * (1 + self.kept)[:, None]).flatten(-2),
    "strides": lambda self, y: y + self.kept[0] * torch.zeros_like(y).index_fill(-1, torch.tensor([0]), 1.0),
    "width": lambda self, y: y * (1 + self.kept[0] * torch._shape_as_tensor(y)[-1]),
    "places": lambda self, y: y + self.kept[0] * torch.ones_like(y).cumsum(-1),
}
"""Operations on features by their position that do not show in numbers: the buffer is 0."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("what", HIDDEN)
def test_what_is_done_to_features_by_their_places_is_no_pair(what: str) -> None:
    assert said_of(HIDDEN[what], state=torch.zeros(4)).endswith("; one by one: 0.fc1, 0.fc2")


ALIKE: list[Callable[[Any, Tensor], Tensor]] = [
    lambda self, y: (y.unflatten(-1, (-1, 4)).flip(-1) * (1 + self.kept)).flatten(-2),
    lambda self, y: y * (1 + self.kept[0] * torch.ones(y.shape[-1], dtype=y.dtype)).tanh(),
    lambda self, y: torch.stack((y[..., ::2] * (1 + self.kept[0]), y[..., 1::2]), -1).flatten(-2),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("between", ALIKE)
def test_what_is_done_to_all_features_wherever_they_lie_is_a_pair(between: Callable[[Any, Tensor], Tensor]) -> None:
    assert said_of(between, state=torch.zeros(4)).endswith("; pairs proved at all numbers: 0.fc1")


def checked(self: Any, y: Tensor) -> Tensor:
    if not torch.isfinite(self.given).all():
        raise ValueError("not finite")
    return y


def halvings(x: Tensor) -> int:
    count = 1
    while x.abs().max() > 200:
        x, count = x / 2, count + 1
    return count


ASKED: list[tuple[Callable[[Any, Tensor], Tensor], bool]] = [
    (checked, True),
    (lambda self, y: y * 2 if (self.given > 20).any() else y, True),
    (lambda self, y: y.softmax(-1) if (self.given.abs() > 20).any() else y, False),
    (lambda self, y: y.softmax(-1) if self.given.abs().max().item() > 20 else y, False),
    (lambda self, y: y if torch.allclose(self.given, self.given.clamp(-20, 20)) else y.softmax(-1), False),
    (lambda self, y: y.relu() if torch.allclose(y, y.clamp(-20, 20)) else y, False),
    (lambda self, y: y / halvings(self.given), False),
    (lambda self, y: y * max(y.detach()[0, 0].tolist()), False),
    (lambda self, y: y * float(f"{y.detach()[0, 0, 0]:.3f}"), False),
    (lambda self, y: y * pickle.loads(pickle.dumps(y.detach()))[0, 0, 0], False),
    (lambda self, y: y * (1 + (from_dlpack(to_dlpack(y.detach())) > 50).any()), False),
    (lambda self, y: y * len(repr(y.detach()[0, 0, 0])), False),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("between", "is_pair"), ASKED)
def test_blocks_that_read_data_in_python_are_followed(between: Callable[[Any, Tensor], Tensor], is_pair: bool) -> None:
    said = "pairs proved at all numbers: 0.fc1" if is_pair else "one by one: 0.fc1, 0.fc2"
    assert said_of(between, kind=Given).endswith(f"; {said}")


def test_numbers_at_places_are_as_many_as_these_whatever_they_are() -> None:
    mask, places = torch.ones(2, 8, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    assert not goes_by_data(torch.ops.aten.index.Tensor, [mask, places, places])
    assert goes_by_data(torch.ops.aten.index.Tensor, [places, mask])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("between", APART)
def test_what_keeps_features_apart_is_a_pair_and_says_so(between: Callable[[Any, Tensor], Tensor]) -> None:
    assert said_of(between).endswith("; pairs proved at all numbers: 0.fc1")


def test_what_a_block_does_for_as_many_samples_as_there_are_parts_its_pair(caplog: pytest.LogCaptureFixture) -> None:
    said_of(lambda self, y: y.softmax(-1) if len(y) == 4 else F.gelu(y), microbatches=1)
    assert "over tp=2: its layers are cut one by one, for in pairs, " in caplog.text
    caplog.clear()
    said_of(lambda self, y: F.relu(y) if len(y) == 4 else F.gelu(y), microbatches=1)
    assert "one by one" not in caplog.text


class Marked(Given):
    """Code between the layers may read an extra input, too."""

    def forward(self, x: Tensor, mark: Tensor) -> Tensor:  # type: ignore[override]
        object.__setattr__(self, "mark", mark)
        result = super().forward(x)
        del self.mark
        return result


def where(condition: Tensor, y: Tensor) -> Tensor:
    return torch.where(condition, torch.arange(y.shape[-1], dtype=y.dtype), y)


MARKED: dict[str, tuple[Callable[[Any, Tensor], Tensor], Tensor]] = {
    "factors": (lambda self, y: y * self.mark[:, None, : y.shape[-1]], torch.ones(4, 4 * WIDTH)),
    "additions": (lambda self, y: y + self.mark[:, None, : y.shape[-1]], torch.zeros(4, 4 * WIDTH)),
    "flags": (lambda self, y: y * self.mark[:, None, : y.shape[-1]], torch.ones(4, 4 * WIDTH, dtype=torch.bool)),
    "a step": (lambda self, y: where(self.mark >= 50, y), torch.tensor(0)),
    "a class": (lambda self, y: where(self.mark[:, None, None] == 1000, y), torch.arange(4)),
    "kinds": (lambda self, y: where(self.mark[..., None] == 3, y), torch.zeros(4, TOKENS, dtype=torch.int64)),
    "a class of many": (lambda self, y: where(self.mark[..., None] == -100, y), torch.arange(4 * TOKENS).view(4, -1)),
    "tokens of 0": (lambda self, y: where((self.given == 0).all(-1, keepdim=True), y), torch.ones(4)),
    "a pair": (lambda self, y: y * self.mark[..., None] * (self.given == 0).all(-1, True), torch.ones(4, TOKENS)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("what", MARKED)
def test_pairs_are_some_for_other_extras_and_with_padding(what: str, caplog: pytest.LogCaptureFixture) -> None:
    between, mark = MARKED[what]
    mark = mark.double() if mark.is_floating_point() else mark
    said_of(between, kind=Marked, extras={"mark": mark}, microbatches=1)
    assert bool(re.search("cut one by one, .* goes by a size that is cut", caplog.text)) == (what != "a pair")
    assert ("one by one" in caplog.text) == (what != "a pair")


HOT = False
STEPS: list[Callable[[Any, Tensor], Tensor]] = [
    lambda self, y: y.softmax(-1) if y.shape[1] > TOKENS else F.gelu(y),
    lambda self, y: y.softmax(-1) if y.shape[0] > 2 else F.gelu(y),
    lambda self, y: y.softmax(-1) if self.config.hot else F.gelu(y),
    lambda self, y: y.softmax(-1) if self.count else F.gelu(y),
    lambda self, y: y.softmax(-1) if HOT else F.gelu(y),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("between", STEPS)
def test_pairs_that_are_none_in_a_later_step_are_refused_before_it(
    between: Callable[[Any, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = qs.compile("gpipe", mesh="pp=2,tp=2", microbatches=2)
    monkeypatch.setitem(globals(), "HOT", False)

    def run(transport: Transport) -> None:
        blocks = [lambda: Between(lambda self, y: y.tanh()), lambda: Between(between)]
        engine = Engine(plan, blocks, loss, sgd, dtype=torch.float64, transport=transport)
        given = [torch.ones(4, TOKENS, WIDTH, dtype=torch.float64), torch.ones(4, TOKENS, WIDTH, dtype=torch.float64)]
        for _ in range(2):
            engine.step(*given)
        for stage in engine.stages.values():
            for block in stage.blocks.values():
                block.config.hot, block.count = True, 1
        globals()["HOT"] = True
        engine.step(*(torch.cat((one, one), 1).repeat(2, 1, 1) for one in given))

    with pytest.raises(
        MisfitError, match=r"block 1 \(Between\) over tp=2 is cut in pairs, '1.fc1' and '1.fc2', but .*"
    ):
        run_local(4, run)


def skipped(self: Any, y: Tensor) -> Tensor:
    return y * 0 if self.training and random.random() < 0.5 else y


def test_draws_of_python_are_no_pair_and_have_to_be_alike_on_all_ranks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = qs.compile("gpipe", mesh="tp=2", microbatches=1)

    def run(transport: Transport) -> str | None:
        engine = Engine(plan, [lambda: Between(skipped)], loss, sgd, dtype=torch.float64, transport=transport)
        if transport.rank == 0:
            cuts.append(str(engine.tensor_cuts))
        engine.step(*(torch.ones(2, TOKENS, WIDTH, dtype=torch.float64) for _ in range(2)))
        return engine.tensor_cuts

    cuts: list[str] = []
    monkeypatch.setattr(compare_twins, "draws_of_python", lambda: (threading.get_ident(),))
    state = random.getstate()
    with pytest.raises(MisfitError, match=r"block 0 \(Between\) over tp=2 draws from Python's .*: seed both alike"):
        run_local(2, run)
    assert cuts[0].endswith("; one by one: 0.fc1, 0.fc2")
    assert "it draws from Python's or numpy's generator" in caplog.text
    assert random.getstate() == state


def test_marks_of_an_expanded_tensor_are_those_of_the_elements_that_it_has():
    shadows, memory = Shadows(torch.int64), torch.zeros(3)
    expanded = memory[None, :, None].expand(2, -1, 4)
    shadows.note(expanded, torch.arange(3)[:, None].expand(2, 3, 4))
    assert torch.equal(shadows.of(expanded), torch.arange(3)[:, None].expand(2, 3, 4))
    assert torch.equal(shadows.of(memory), torch.arange(3))
