"""Optimizers that keep what they know in odd places, and of odd types."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class Base(Optimizer):
    """Plain descent by `moved`, which each kind finds in its own way after it has begun a step."""

    needs_whole_parameters = False

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.begin()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_((self.moved(group, p, self.state[p]) * group["lr"]).to(p.dtype))

    def begin(self) -> None:
        pass

    def moved(self, group: dict[str, Any], p: nn.Parameter, state: dict[Any, Any]) -> Any:
        return p.grad


class InGroups(Base):
    """Counts in its groups, as schedule-free does."""

    def begin(self) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["d"] = group.get("d", torch.ones(())) * 0.9

    def moved(self, group: Any, p: Any, state: Any) -> Any:
        return p.grad / group["count"] * group["d"]


class Unsaid(InGroups):
    """The same, and does not say what its step depends on."""

    needs_whole_parameters = None  # type: ignore[assignment]


class InAttributes(Base):
    """Counts in an attribute, and has a state_dict of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count, self.sums = 0, [1.0, 0.5]

    def begin(self) -> None:
        self.count += 1
        self.sums[0] *= 0.987654321

    def moved(self, group: Any, p: Any, state: Any) -> Any:
        return p.grad * self.sums[0] / self.count

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}


class Numbers(Base):
    """Keeps an int and a float for each parameter, as Adam by hand does."""

    def moved(self, group: Any, p: Any, state: Any) -> Any:
        state["step"], state["mu"] = state.get("step", 0) + 1, state.get("mu", 1.0) * 0.987654321
        assert (type(state["step"]), type(state["mu"])) == (int, float)
        return p.grad * state["mu"] / (1 - 0.9 ** state["step"])


class Mixed(Base):
    """Keeps None, a string, a flag, a tuple, and nested ones."""

    def moved(self, group: Any, p: Any, state: Any) -> Any:
        if not state:
            state.update(buffer=None, mode="first", warm=True, span=(0, 1.5), inner={"n": 0, 3: [None]})
            state[7] = torch.zeros(3, dtype=torch.uint8)
        state["inner"]["n"] += 1
        state[7] += 1
        assert isinstance(state["span"], tuple)
        if state["inner"]["n"] == 4:
            state.update(buffer=p.grad.clone(), mode="then", warm=False)
        used = p.grad if state["buffer"] is None else state["buffer"]
        return used * (2 if state["mode"] == "first" and state["warm"] is True else 1)


class Wrapping(Base):
    """Steps Adam, and then goes back a little; Adam's state is its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.base = torch.optim.Adam(self.param_groups[0]["params"], lr=0.01)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        for p in self.param_groups[0]["params"]:
            slow = self.state[p].setdefault("slow", p.clone())
            p.copy_(slow.lerp_(p, 0.8))


ODD = (InGroups, InAttributes, Numbers, Mixed, Wrapping)


class Counter:
    def __init__(self) -> None:
        self.count = 0


class InObject(Base):
    """Counts in an object of a class of its own, which no file holds."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.counter = Counter()

    def begin(self) -> None:
        self.counter.count += 1

    def moved(self, group: Any, p: Any, state: Any) -> Any:
        return p.grad / self.counter.count
