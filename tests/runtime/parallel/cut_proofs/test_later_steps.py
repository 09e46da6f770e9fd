"""Pairs in later steps: what was set, or is longer, is proved again; a pair that is one still goes on."""

from __future__ import annotations

import array
import contextvars
import ctypes
import functools
import operator
import os
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.engine import Engine
from quintsched.runtime.user_objects.control_flow_state import SteeringState

from ...toys import sgd
from .odd_mlps import HIDDEN, TOKENS
from .training import Between, Seeing, Trained, batch, loss, refusal, require_equal, train

SETTINGS: dict[str, Any] = {}


def places(y: Tensor) -> Tensor:
    return y * torch.arange(y.shape[-1], dtype=y.dtype)


def switched(y: Tensor, hot: bool = False) -> Tensor:
    return places(y) if hot or getattr(switched, "hot", False) else y


def in_class(kind: type) -> Callable[[Any], None]:
    return lambda block: setattr(block.act, "__class__", kind)


class Places(nn.Tanh):
    def forward(self, input: Tensor) -> Tensor:
        return places(input)


class Later(Seeing):
    """x + fc2(between(fc1(x))) with what may be set in many places."""

    def has(self) -> dict[str, Any]:
        return {"act": nn.Tanh(), "partial": functools.partial(switched, hot=False)}


def layer(block: Any, name: str) -> nn.Module:
    return dict(block.named_modules())[name]


class Halving(TorchDispatchMode):
    """A mode that a loop enters around a step, which keeps features apart."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 0.5 if func is torch.ops.aten.gelu.default else found


class Joining(TorchFunctionMode):
    """A mode that a loop enters around a step, which joins features."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return places(found) if func is torch.sigmoid else found


NONE: dict[str, tuple[Between, Callable[[Any], object]]] = {
    "a flag": (lambda self, y: places(y) if self.config.hot else y, lambda block: setattr(block.config, "hot", True)),
    "a global": (lambda self, y: switched(y, SETTINGS["hot"]), lambda block: SETTINGS.update(hot=True)),
    "a module": (lambda self, y: self.act(y), lambda block: setattr(block, "act", nn.Softmax(-1))),
    "its class": (lambda self, y: self.act(y), in_class(Places)),
    "its attribute": (lambda self, y: self.act(y), lambda block: setattr(block.act, "forward", places)),
    "a hook": (
        lambda self, y: y,
        lambda block: layer(block, "fc1").register_forward_hook(lambda m, a, out: places(out)),
    ),
    "a hook before": (
        lambda self, y: y,
        lambda block: layer(block, "fc2").register_forward_pre_hook(lambda m, args: (places(args[0]),)),
    ),
    "a hook of all modules": (
        lambda self, y: self.act(y),
        lambda block: register_module_forward_hook(lambda m, a, out: places(out) if isinstance(m, nn.Tanh) else out),
    ),
    "a mode around": (lambda self, y: torch.sigmoid(y), lambda block: Joining().__enter__()),
    "hooks of saved tensors": (
        lambda self, y: y.tanh(),
        lambda block: saved_tensors_hooks(lambda saved: saved / saved.abs().max(), lambda saved: saved).__enter__(),
    ),
    "an attribute of a weight": (
        lambda self, y: places(y) if hasattr(self.fc1.weight, "hot") else y,
        lambda block: setattr(layer(block, "fc1").weight, "hot", True),
    ),
    "an attribute of another": (
        lambda self, y: places(y) if getattr(self.fc2.bias, "hot", False) else y,
        lambda block: setattr(layer(block, "fc2").bias, "hot", True),
    ),
    "a partial": (lambda self, y: self.partial(y), lambda block: block.partial.keywords.update(hot=True)),
    "a function's": (lambda self, y: switched(y), lambda block: setattr(switched, "hot", True)),
    "a default": (lambda self, y: switched(y), lambda block: setattr(switched, "__defaults__", (True,))),
    "a mode": (lambda self, y: places(y) if self.act.training != self.training else y, lambda block: block.act.eval()),
    "an extra": (lambda self, y: places(y) if self.extra else y, lambda block: None),
    "a length": (lambda self, y: places(y) if y.shape[1] > TOKENS else y, lambda block: None),
    "a group": (
        lambda self, y: y.reshape(-1, 4 if y.shape[1] == TOKENS else y.shape[-1]).softmax(-1).view_as(y),
        lambda block: None,
    ),
    "what asks elsewhere": (
        lambda self, y: y * float(os.environ.get("HEAT", "1")) if self.config.hot else y,
        lambda block: setattr(block.config, "hot", True),
    ),
    "a length by which it asks elsewhere": (
        lambda self, y: places(y) if y.shape[1] > TOKENS and os.environ.get("HEAT") else y,
        lambda block: None,
    ),
    "a width": (lambda self, y: y * (y.shape[-1] if y.shape[1] > TOKENS else 1), lambda block: None),
    "samples": (lambda self, y: y * (y.shape[-1] if len(y) > 2 else HIDDEN), lambda block: None),
}
STILL: dict[str, tuple[Between, Callable[[Any], object]]] = {
    "a mode around": (lambda self, y: F.gelu(y), lambda block: Halving().__enter__()),
    "a module": (lambda self, y: self.act(y), lambda block: setattr(block, "act", nn.Sigmoid())),
    "a hook": (lambda self, y: y, lambda block: layer(block, "fc1").register_forward_hook(lambda m, a, out: out * 1.5)),
    "a number": (lambda self, y: y * self.config.hot, lambda block: setattr(block.config, "hot", 0.5)),
    "a length": (lambda self, y: y.tanh() if y.shape[1] > TOKENS else y, lambda block: None),
}


@pytest.fixture(autouse=True)
def as_before() -> Any:
    SETTINGS["hot"] = False
    yield
    nn.modules.module._global_forward_hooks.clear()
    switched.__dict__.clear()
    switched.__defaults__ = (False,)


def steps_of(what: str, change: Callable[[Any], object]) -> dict[str, Any]:
    """Return how to train in three steps, before the second of which a block is changed, or other batches come."""
    more = {"length": 2 * TOKENS} if what.startswith(("a length", "a group", "a width")) else {}
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


def equal_to_one_process(
    between: Between, what: str = "", change: Callable[[Any], object] = lambda block: None
) -> None:
    steps = steps_of(what, change)
    (alone,) = train("pp=1", [lambda: Later(between)], **steps)
    require_equal(train("tp=2", [lambda: Later(between)], **steps), alone, 1e-8)


ON_LAYERS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a hook": (
        lambda fc1: fc1.weight.register_hook(lambda gradient: gradient - gradient.mean(0)),
        r"a hook was registered on the weight '0\.fc1\.weight', .* engine again",
    ),
    "a forward": (
        lambda fc1: setattr(fc1, "forward", lambda x: F.linear(x, fc1.weight.sign())),
        r"'forward' was set on the layer '0\.fc1', of .* before the engine is built",
    ),
    "a class": (
        lambda fc1: setattr(fc1, "__class__", Places),
        r"the class of the layer '0\.fc1' was replaced, of which",
    ),
    "an attribute": (
        lambda fc1: setattr(fc1, "hot", True),
        r"'hot', which .* names, .* '0\.fc1', .* set it on the block",
    ),
    "torch's forward": (
        lambda fc1: setattr(nn.Linear, "forward", lambda self, x: F.linear(x, self.weight.sign())),
        "torch's own forward of linear layers or embeddings was replaced, of which",
    ),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("what", ON_LAYERS)
def test_what_is_set_on_a_layer_of_which_ranks_have_shards_is_refused(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Linear, "forward", nn.Linear.forward)  # puts it back
    change, said = ON_LAYERS[what]

    def between(self: Any, y: Tensor) -> Tensor:
        return places(y) if getattr(self.fc1, "hot", False) else y

    steps = steps_of(what, lambda block: change(layer(block, "fc1")))
    assert re.search(said, refusal("tp=2", [lambda: Later(between)], **steps))


@pytest.mark.slow
def test_labels_that_no_code_names_may_be_set_on_layers() -> None:
    equal_to_one_process(lambda self, y: y, change=lambda block: setattr(layer(block, "fc1"), "label", 1))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("what", STILL)
def test_what_is_a_pair_still_goes_on(what: str) -> None:
    between, change = STILL[what]
    equal_to_one_process(between, what, change)


def test_dictionaries_of_modules_of_libraries_are_not_walked() -> None:
    block = Later(lambda self, y: F.gelu(y) if "hot" in type(self).__dict__ else y)
    assert len(SteeringState({"block": block}).places) < 1000


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
        with pytest.raises(MisfitError, match=says):
            float(engine.evaluate(x, y).loss) if by == "an evaluation" else engine.step(x, y)
        assert all(torch.equal(weight, before[name]) for name, weight in engine.full_weights().items())

    run_local(2, run)


class Switch:
    """Switch outside a block that decides whether it mixes its features."""

    def __init__(self) -> None:
        self.on = False


def outside() -> dict[str, tuple[Callable[[Any], Any], Callable[[Any], object]]]:
    """Return what nobody can compare: what asks for it, and what sets it."""
    switch, numbers, buffer, tensor = Switch(), array.array("i", [0]), bytearray(1), torch.zeros(1)
    reference, event, cached = weakref.ref(switch), threading.Event(), functools.lru_cache(lambda: switch.on)
    getter, variable = operator.attrgetter("on"), contextvars.ContextVar("variable", default=False)
    count = ctypes.c_int(0)
    return {
        "the environment": (lambda _: os.environ.get("HEAT"), lambda _: os.environ.update(HEAT="1")),
        "a context variable": (lambda _: variable.get(), lambda _: variable.set(True)),
        "a switch of torch": (
            lambda _: torch.get_float32_matmul_precision() == "high",
            lambda _: torch.set_float32_matmul_precision("high"),
        ),
        "an event": (lambda _: event.is_set(), lambda _: event.set()),
        "an array": (lambda _: numbers[0], lambda _: numbers.__setitem__(0, 1)),
        "bytes": (lambda _: buffer[0], lambda _: buffer.__setitem__(0, 1)),
        "a number of C": (lambda _: count.value, lambda _: setattr(count, "value", 1)),
        "a weak reference": (lambda _: vars(reference())["on"], lambda _: setattr(switch, "on", True)),
        "a cache": (lambda _: cached(), lambda _: vars(switch).update(on=True) or cached.cache_clear()),  # type: ignore
        "a getter": (lambda _: getter(switch), lambda _: setattr(switch, "on", True)),
        "a tensor of nobody": (lambda _: tensor, lambda _: tensor.fill_(1)),
        "identities": (lambda self: SETTINGS.get(f"{id(self)}"), lambda self: SETTINGS.update({f"{id(self)}": True})),
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize("what", outside())
def test_what_nobody_can_compare_has_layers_cut_one_by_one(what: str, caplog: pytest.LogCaptureFixture) -> None:
    def trained(mesh: str) -> list[Trained]:
        ask, change = outside()[what]

        def between(self: Any, y: Tensor) -> Tensor:
            if what == "a tensor of nobody":
                return y + ask(self) * places(y)
            return places(y) if ask(self) else y

        try:
            return train(mesh, [lambda: Later(between)], **steps_of(what, change))
        finally:
            clear()

    require_equal(trained("tp=2"), trained("pp=1")[0], 1e-8)
    assert "are cut one by one over tp, since as a pair, it " in caplog.text


def clear() -> None:
    os.environ.pop("HEAT", None)
    SETTINGS.clear()
    torch.set_float32_matmul_precision("highest")


DRAWN: dict[str, Between] = {
    "a number for all": lambda self, y: y * torch.rand((), dtype=y.dtype),
    "rows": lambda self, y: y * (torch.rand(y.shape[0], 1, 1, dtype=y.dtype) > 0.4),
    "tokens": lambda self, y: y * (torch.rand(y.shape[:2], dtype=y.dtype) > 0.4)[..., None],
    "channels": lambda self, y: F.dropout1d(y, 0.4),
    "channels that are features": lambda self, y: F.dropout1d(y.mT, 0.4).mT,
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
    def between(self: Any, y: Tensor) -> Tensor:
        return DRAWN[what](self, y) if self.training else y

    equal_to_one_process(between)
    is_parted = bool(re.search("cut one by one over tp, since as a pair, (block 0|it) draws by", caplog.text))
    assert is_parted == (what in ("tokens", "channels", "channels that are features", "an order of tokens"))
