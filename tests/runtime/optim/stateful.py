"""Optimizers that keep what they know in odd places, and of odd types."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class Base(Optimizer):
    """Plain descent by a factor, which each kind finds in its own way."""

    needs_whole_parameters = False

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    def every(self) -> Iterator[tuple[dict[str, Any], nn.Parameter, dict[str, Any]]]:
        for group in self.param_groups:
            for p in group["params"]:
                yield group, p, self.state[p]


class InGroups(Base):
    """Counts in its groups, as schedule-free does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["d"] = group.get("d", torch.ones(())) * 0.9
            for p in group["params"]:
                p.sub_(p.grad * (group["lr"] / group["count"] * group["d"]))


class Unsaid(InGroups):
    """The same, and does not say what its step depends on."""

    needs_whole_parameters = None  # type: ignore[assignment]


class InAttributes(Base):
    """Counts in an attribute, and has a state_dict of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count, self.sums = 0, [1.0, 0.5]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.sums[0] *= 0.987654321
        for group, p, _ in self.every():
            p.sub_(p.grad * (group["lr"] * self.sums[0] / self.count))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}


class OfAll(Base):
    """Counts in a state that is of no parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["all"]["count"] = self.state["all"].get("count", 0) + 1
        for group, p, _ in self.every():
            p.sub_(p.grad * (group["lr"] / self.state["all"]["count"]))


class Numbers(Base):
    """Keeps an int and a float for each parameter, as Adam by hand does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p, state in self.every():
            state["step"], state["mu"] = state.get("step", 0) + 1, state.get("mu", 1.0) * 0.987654321
            assert type(state["step"]) is int
            assert type(state["mu"]) is float
            p.sub_(p.grad * (group["lr"] * state["mu"] / (1 - 0.9 ** state["step"])))


class Mixed(Base):
    """Keeps None, a string, a flag, a tuple, and nested ones."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p, state in self.every():
            if not state:
                state.update(buffer=None, mode="first", warm=True, span=(0, 1.5), inner={"n": 0, 3: [None]})
                state[7] = torch.zeros(3, dtype=torch.uint8)
            state["inner"]["n"] += 1
            state[7] += 1
            assert isinstance(state["span"], tuple)
            if state["inner"]["n"] == 4:
                state.update(buffer=p.grad.clone(), mode="then", warm=False)
            used = p.grad if state["buffer"] is None else state["buffer"]
            p.sub_(used * (group["lr"] * (2 if state["mode"] == "first" and state["warm"] is True else 1)))


class History(Base):
    """Keeps the last gradients, in a list and in a queue."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p, state in self.every():
            past = state.setdefault("past", [])
            queue = state.setdefault("queue", deque(maxlen=2))
            past.append(p.grad.clone())
            queue.append(p.grad.to(torch.float64, copy=True))
            del past[:-2]
            p.sub_((sum(past) + sum(queue).to(p.dtype)) * group["lr"])


class Dotted(Base):
    """Has dots and other signs in its keys, and tensors of other types."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p, state in self.every():
            mean = state.setdefault("a.b/é#", torch.zeros_like(p, dtype=torch.float64))
            signs = state.setdefault("signs.low", torch.zeros_like(p, dtype=torch.int8))
            mean.add_(p.grad)
            signs.add_(p.grad.sign().to(torch.int8))
            p.sub_(((mean + 0.1 * signs) * group["lr"]).to(p.dtype))


class OneStep(Base):
    """All parameters have one tensor that counts."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        first = next(state for _, _, state in self.every())
        count = first.setdefault("count", torch.zeros(()))
        count += 1
        for group, p, state in self.every():
            state["count"] = state.get("count", count)
            p.sub_(p.grad * (group["lr"] / state["count"]))


class ByParameter(Base):
    """Has a dict by parameters beside its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.means: dict[nn.Parameter, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p, _ in self.every():
            self.means[p] = self.means.get(p, torch.zeros_like(p)) * 0.9 + p.grad
            p.sub_(self.means[p] * group["lr"])


class Wrapping(Base):
    """Steps Adam, and then goes back a little; Adam's state is its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.base = torch.optim.Adam(self.param_groups[0]["params"], lr=0.01)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        for _, p, state in self.every():
            slow = state.setdefault("slow", p.clone())
            p.copy_(slow.lerp_(p, 0.8))


ODD = (InGroups, InAttributes, OfAll, Numbers, Mixed, History, Dotted, OneStep, ByParameter, Wrapping)


class Beholder(InAttributes):
    """Also knows a model and a logger, which change without it, and itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.model, self.log, self.me = nn.BatchNorm1d(2), logging.getLogger("beholder"), [self]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.model(torch.randn(4, 2, generator=torch.Generator().manual_seed(0)))
        self.log.isEnabledFor(self.count)
        super().step()


class Counter:
    def __init__(self) -> None:
        self.count = 0


class InObject(Base):
    """Counts in an object of a class of its own, which no file holds."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.counter = Counter()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.counter.count += 1
        for group, p, _ in self.every():
            p.sub_(p.grad * (group["lr"] / self.counter.count))


class Elsewhere(Base):
    """Counts where nobody sees it, and gives that in its state_dict."""

    count = [0]  # noqa: RUF012

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count[0] += 1
        for group, p, _ in self.every():
            p.sub_(p.grad * (group["lr"] / self.count[0]))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count[0]}


class KeepsObject(Base):
    """Keeps an object for each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, p, state in self.every():
            state.setdefault("counter", Counter()).count += 1
            p.sub_(p.grad * (group["lr"] / state["counter"].count))
