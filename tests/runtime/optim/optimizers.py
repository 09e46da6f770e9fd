"""Optimizers as users write them, and a loss, which tests of several rooms train with.

The last ones keep what they know in odd places, and of odd types.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def squared(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets).square().sum()


def gradients(optimizer: Optimizer) -> list[Any]:
    """Return the parameters that have gradients."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


class Shampoo(Optimizer):
    """Preconditions matrices on one side, and leaves the rest to plain descent."""

    needs_whole_parameters = True

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in gradients(self):
            update = p.grad
            if p.dim() == 2:
                left = self.state[p].setdefault("left", torch.eye(len(p), dtype=p.dtype)).add_(update @ update.T)
                update = torch.linalg.solve(left, update)
            p.add_(update, alpha=-self.defaults["lr"])


class LargestNorm(Optimizer):
    """Moves by gradients over the largest norm of any of them, and does not say so."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = gradients(self)
        largest = torch.stack([p.grad.norm() for p in every]).max()
        for p in every:
            p.add_(p.grad / largest, alpha=-0.01)


class SignMomentum(Optimizer):
    """Lion's idea: each number moves by the sign of its mean gradient; it keeps options beside its groups.

    Matrices alone decay, and it goes by a weight's own dimensions for that.
    """

    needs_whole_parameters = False

    def __init__(self, params: Any, lr: float = 0.001) -> None:
        super().__init__(params, {"lr": lr})
        self.beta = 0.9

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in gradients(self):
            mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 1 - self.beta)
            p.mul_(1 - 0.1 * (p.ndim > 1)).add_(torch.tanh(100 * mean), alpha=-self.defaults["lr"])


class Lookahead(Optimizer):
    """Steps another optimizer, and goes back half of the way every second time; it copies weights as it is built."""

    def __init__(self, base: Optimizer) -> None:
        self.base = base
        super().__init__([p for group in base.param_groups for p in group["params"]], {})
        self.param_groups = base.param_groups
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.count += 1
        if self.count % 2 == 0:
            for slow, p in zip(self.slow, [p for g in self.param_groups for p in g["params"]], strict=True):
                p.copy_(slow.lerp_(p, 0.5))


class Lamb(Optimizer):
    """You et al. 2020: Adam's update, as long as the parameter; gradients are clipped first."""

    needs_whole_parameters = True

    def __init__(self, params: Any, lr: float = 0.01, clip: float | None = None) -> None:
        super().__init__(params, {"lr": lr})
        self.clip = clip
        self.needs_gradient_norm = clip is not None

    def divisor(self) -> float:
        norm = torch.stack([p.grad.norm() for p in gradients(self)]).norm()
        return 1.0 if self.clip is None else float(torch.clamp(norm / self.clip, min=1.0))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        divisor = self.divisor()
        for p in gradients(self):
            state, gradient = self.state[p], p.grad / divisor
            first = state.setdefault("first", torch.zeros_like(p)).lerp_(gradient, 0.1)
            second = state.setdefault("second", torch.zeros_like(p)).lerp_(gradient.square(), 0.01)
            update = first / (second.sqrt() + 1e-6) + 0.1 * p
            trust = p.norm() / update.norm()
            p.add_(update * torch.where(trust > 0, trust, 1.0), alpha=-self.defaults["lr"])


class Lars(Lamb):
    """You et al. 2017: momentum, in proportion to the parameter's norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        divisor = self.divisor()
        for p in gradients(self):
            update = p.grad / divisor + 0.01 * p  # type: ignore[operator]
            trust = (p.norm() + 0.1) / (update.norm() + 0.1)
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(update * trust)
            p.add_(momentum, alpha=-0.05)


class ClippingAdamW(torch.optim.AdamW):
    needs_whole_parameters, needs_gradient_norm = False, True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_(gradients(self), 0.1)
        super().step(closure)


def by_dims(parameters: Sequence[nn.Parameter]) -> Optimizer:
    """AdamW that decays matrices only, as nanoGPT does."""
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.3},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-3,
    )


def by_shape(parameters: Sequence[nn.Parameter]) -> Optimizer:
    """AdamW whose learning rate goes by the width of a matrix."""
    return torch.optim.AdamW([{"params": [p], "lr": 0.01 / (p.shape[0] if p.dim() else 1)} for p in parameters])


def muon(parameters: Sequence[nn.Parameter]) -> list[Optimizer]:
    """Muon for matrices, AdamW for the rest."""
    return [
        torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.01),
        torch.optim.AdamW([p for p in parameters if p.dim() != 2], lr=1e-3),
    ]


def adafactor(parameters: Sequence[nn.Parameter]) -> Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.01, eps=(1e-6, 1e-3))


class Several:
    """Optimizers in one, for a plain loop."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = parts

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()


def plain(build: Any) -> Any:
    """Return what builds an optimizer for a plain loop out of what builds it for the engine."""

    def built(parameters: Sequence[nn.Parameter]) -> Any:
        made = build(parameters)
        return Several(made) if isinstance(made, list) else made

    return built


def scaling(factors: Callable[[list[torch.Tensor]], list[float]]) -> Callable[..., None]:
    """Return a hook that scales each of the gradients by a number."""

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found = [p.grad for p in gradients(optimizer)]
        for gradient, factor in zip(found, factors(found), strict=True):  # type: ignore[arg-type]
            gradient.mul_(factor)

    return hook


def hooked(hook: Callable[[], Any], kind: Any = torch.optim.SGD, **said: bool) -> Callable[[Any], Optimizer]:
    """Return what builds an optimizer with a hook before its steps, and says something of it."""

    def build(parameters: Any) -> Optimizer:
        made: Optimizer = kind(parameters, lr=0.1)
        made.register_step_pre_hook(hook())
        vars(made).update(said)
        return made

    return build


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


ODD = (InGroups, InAttributes, Numbers, Mixed)


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
