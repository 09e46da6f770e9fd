"""Pairs in later steps: what was set, or is longer, is proved again; a pair that is one still goes on."""

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import quintsched as qs
from quintsched.runtime import Engine, Transport, run_local

from ....helpers.blocks import of_kind
from ....helpers.training import require_equal
from ...toys import sgd
from .odd_blocks import HIDDEN, TOKENS
from .training import Between, Seeing, Trained, batch, loss, refusal, train

SETTINGS: dict[str, Any] = {}
Change = Callable[[Any], object]


def places(y: Tensor) -> Tensor:
    return y * torch.arange(y.shape[-1], dtype=y.dtype)


def switched(y: Tensor, hot: bool = False) -> Tensor:
    return places(y) if hot else y


Places = of_kind(nn.Tanh, lambda self, input: places(input))


class Later(Seeing):
    """x + fc2(between(fc1(x))) with what may be set in many places."""

    def has(self) -> dict[str, Any]:
        return {"act": nn.Tanh()}


class Joining(TorchFunctionMode):
    """A mode that a loop enters around a step, which joins features."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return places(found) if func is torch.sigmoid else found


def acting(self: Any, y: Tensor) -> Tensor:
    return self.act(y)


def heat(block: Any) -> None:
    block.config.hot = True


NONE: dict[str, tuple[Between, Change]] = {
    "a flag": (lambda self, y: places(y) if self.config.hot else y, heat),
    "a global": (lambda self, y: switched(y, SETTINGS["hot"]), lambda block: SETTINGS.update(hot=True)),
    "a module": (acting, lambda block: setattr(block, "act", nn.Softmax(-1))),
    "a hook": (
        lambda self, y: y,
        lambda block: layer(block, "fc1").register_forward_hook(lambda m, a, out: places(out)),
    ),
    "a mode around": (lambda self, y: torch.sigmoid(y), lambda block: Joining().__enter__()),
    "a default": (lambda self, y: switched(y), lambda block: setattr(switched, "__defaults__", (True,))),
    "a mode": (lambda self, y: places(y) if self.act.training != self.training else y, lambda block: block.act.eval()),
    "an extra": (lambda self, y: places(y) if self.extra else y, lambda block: None),
    "a length": (lambda self, y: places(y) if y.shape[1] > TOKENS else y, lambda block: None),
    "what asks elsewhere": (lambda self, y: y * float(os.environ.get("HEAT", "1")) if self.config.hot else y, heat),
    "samples": (lambda self, y: y * (y.shape[-1] if len(y) > 2 else HIDDEN), lambda block: None),
}
STILL: dict[str, tuple[Between, Change]] = {
    "a module": (acting, lambda block: setattr(block, "act", nn.Sigmoid())),
    "a hook": (lambda self, y: y, lambda block: layer(block, "fc1").register_forward_hook(lambda m, a, out: out * 1.5)),
    "a length": (lambda self, y: y.tanh() if y.shape[1] > TOKENS else y, lambda block: None),
}


def layer(block: Any, name: str) -> nn.Module:
    return dict(block.named_modules())[name]


@pytest.fixture(autouse=True)
def as_before() -> Any:
    SETTINGS["hot"] = False
    yield
    os.environ.pop("HEAT", None)
    switched.__defaults__ = (False,)


def steps_of(what: str, change: Change) -> dict[str, Any]:
    """Return how to train in three steps, before the second of which a block is changed, or other batches come."""
    more = {"length": 2 * TOKENS} if what == "a length" else {}
    later = {"samples": 4 if what == "samples" else 2} | more
    return {
        "batches": [batch(1, samples=2), batch(2, **later), batch(3, **later)],
        "microbatches": 1,
        "change": lambda block, step: step == 1 and change(block),
        "extras": (lambda step: {"extra": int(step > 0)}) if what == "an extra" else None,
    }


@pytest.mark.sampled(7)
@pytest.mark.parametrize("what", NONE)
def test_what_is_no_pair_any_more_is_refused_before_the_step(what: str) -> None:
    between, change = NONE[what]
    said = refusal("tp=2", [lambda: Later(between)], **steps_of(what, change))
    assert re.match(r"block 0 \(Later\) over tp=2 is cut in pairs, .* (was set, and now|given) .*", said)


def equal_to_one_process(between: Between, what: str = "", change: Change = lambda block: None) -> None:
    steps = steps_of(what, change)
    (alone,) = train("pp=1", [lambda: Later(between)], **steps)
    require_equal(train("tp=2", [lambda: Later(between)], **steps), alone, 1e-8)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("what", STILL)
def test_what_is_a_pair_still_goes_on(what: str) -> None:
    between, change = STILL[what]
    equal_to_one_process(between, what, change)


ON_LAYERS: dict[str, Change] = {
    r"a hook was registered on the weight '0\.fc1\.weight', .* engine again": (
        lambda fc1: fc1.weight.register_hook(lambda gradient: gradient - gradient.mean(0))
    ),
    r"'forward' was set on the layer '0\.fc1', of .* before the engine is built": (
        lambda fc1: setattr(fc1, "forward", lambda x: F.linear(x, fc1.weight.sign()))
    ),
    r"the class of the layer '0\.fc1' was replaced, of which": lambda fc1: setattr(fc1, "__class__", Places),
    r"'hot', which .* names, .* '0\.fc1', .* set it on the block": lambda fc1: setattr(fc1, "hot", True),
    "torch's own forward of linear layers or embeddings was replaced, of which": (
        lambda fc1: setattr(nn.Linear, "forward", lambda self, x: F.linear(x, self.weight.sign()))
    ),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("said", ON_LAYERS)
def test_what_is_set_on_a_layer_of_which_ranks_have_shards_is_refused(said, monkeypatch):
    monkeypatch.setattr(nn.Linear, "forward", nn.Linear.forward)  # puts it back

    def between(self: Any, y: Tensor) -> Tensor:
        return places(y) if getattr(self.fc1, "hot", False) else y

    steps = steps_of("", lambda block: ON_LAYERS[said](layer(block, "fc1")))
    assert re.search(said, refusal("tp=2", [lambda: Later(between)], **steps))


class Setting(nn.Module):
    """Sets something for blocks behind it."""

    def __init__(self, box: dict[str, bool]) -> None:
        super().__init__()
        self.box = box

    def forward(self, x: Tensor) -> Tensor:
        self.box["hot"] = bool(x.abs().max() > 5)
        return x


@pytest.mark.sampled(3)
@pytest.mark.parametrize("by", ["a block", "the loss", "an evaluation", "a block, and back"])
def test_what_is_set_while_a_step_runs_is_refused_before_weights_change(by: str) -> None:
    def run(transport: Transport) -> None:
        box = {"hot": False}

        def setting_loss(output: Tensor, targets: Tensor) -> Any:
            if by == "the loss" or "back" in by:
                box["hot"] = by == "the loss" and bool(targets.max() > 5)
            return loss(output, targets)

        first = Setting({} if by == "the loss" else box)
        blocks = [lambda: first, lambda: Later(lambda self, y: places(y) if box["hot"] else y)]
        plan = qs.compile("gpipe", mesh="tp=2", microbatches=2)
        engine = Engine(plan, blocks, setting_loss, sgd, dtype=torch.float64, transport=transport)
        x, y = batch(1)
        engine.step(x, y)
        before = engine.full_weights()
        half = slice(2) if "back" in by else slice(2, 4)  # which the other one would undo
        x[half], y[half] = 9.0, 9.0
        says = r"block 1 \(Later\) .*\['hot'\]\" was changed while a step ran, .* extra, or let"
        with pytest.raises(qs.MisfitError, match=says):
            float(engine.evaluate(x, y).loss) if by == "an evaluation" else engine.step(x, y)
        assert all(torch.equal(weight, before[name]) for name, weight in engine.full_weights().items())

    run_local(2, run)


def outside() -> dict[str, tuple[Callable[[Any], Any], Callable[[], object]]]:
    """Return what nobody can compare: what asks for it, and what sets it."""
    tensor = torch.zeros(1)
    return {
        "the environment": (lambda _: os.environ.get("HEAT"), lambda: os.environ.update(HEAT="1")),
        "a tensor of nobody": (lambda _: bool(tensor), lambda: tensor.fill_(1)),
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize("what", outside())
def test_what_nobody_can_compare_has_layers_cut_one_by_one(what: str, caplog: pytest.LogCaptureFixture) -> None:
    def trained(mesh: str) -> list[Trained]:
        os.environ.pop("HEAT", None)
        ask, change = outside()[what]
        steps = steps_of(what, lambda block: change())
        return train(mesh, [lambda: Later(lambda self, y: places(y) if ask(self) else y)], **steps)

    require_equal(trained("tp=2"), trained("pp=1")[0], 1e-8)
    assert "are cut one by one over tp, since as a pair, it " in caplog.text


DRAWN: dict[str, Between] = {
    "rows": lambda self, y: y * (torch.rand(y.shape[0], 1, 1, dtype=y.dtype) > 0.4),
    "tokens": lambda self, y: y * (torch.rand(y.shape[:2], dtype=y.dtype) > 0.4)[..., None],
    "features before tokens": lambda self, y: F.dropout(y.mT, 0.4).mT,
    "an order of tokens": lambda self, y: y[:, torch.randperm(y.shape[1])],
    "heads with samples": lambda self, y: (
        F.dropout(y.unflatten(-1, (-1, 4)).transpose(1, 2).flatten(0, 1), 0.4)
        .unflatten(0, (y.shape[0], -1))
        .transpose(1, 2)
        .flatten(2)
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("what", DRAWN)
def test_what_is_drawn_between_the_layers_is_that_of_one_process(what: str, caplog: pytest.LogCaptureFixture) -> None:
    equal_to_one_process(lambda self, y: DRAWN[what](self, y) if self.training else y)
    is_parted = bool(re.search("cut one by one over tp, since as a pair, (block 0|it) draws by", caplog.text))
    assert is_parted == (what in ("tokens", "an order of tokens"))
