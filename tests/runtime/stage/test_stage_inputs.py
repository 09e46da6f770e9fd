"""Inputs of a stage look as in one process, apart from their numbers."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quintsched as qs
from quintsched.runtime import Engine, Transport, run_local

from ...helpers.training import check_equality, train_alone, train_ranks

WIDTH, STEPS = 6, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, **extras: Tensor) -> Any:
        return x + torch.tanh(self.fc(x))


def model(*kinds: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), *(kind() for kind in kinds), nn.Linear(WIDTH, 3)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator).double(), torch.randint(0, 3, (8,), generator=generator)


def check(
    *kinds: type[nn.Module],
    build: Callable[[], Any] | None = None,
    stages: int = 2,
    recompute: int = 0,
    **extras: Tensor,
) -> None:
    """Train blocks of these kinds, with a layer before them and a head, on stages as in one process."""
    plan = qs.compile("1f1b", mesh=f"pp={stages}", microbatches=2, recompute=recompute)
    batches = [(*batch(step), {name: extra.clone() for name, extra in extras.items()}) for step in range(STEPS + 1)]
    blocks = list((build or partial(model, *kinds))())
    check_equality(plan, blocks, F.cross_entropy, by_rates, batches)


def by_rates(parameters: Any) -> torch.optim.Optimizer:
    groups = [{"params": [p], "lr": getattr(p, "lr", 0.1)} for p in parameters]
    return torch.optim.SGD(groups, lr=0.1)


class Transposed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(x) * (1.0 if x.is_contiguous() else 0.6)
        return made.t().contiguous().t()


class Sliced(Layer):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(x) * (1.0 if x.is_contiguous() else 0.6)
        return torch.cat([made, made], 1)[:, :WIDTH]


class AsksForGraph(Layer):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(x)
        return made if x.grad_fn is not None else 0.6 * made


@pytest.mark.parametrize("recompute", [0, 2])
@pytest.mark.parametrize("kind", [AsksForGraph, Transposed, Sliced])
def test_inputs_of_stages_are_no_leaves_and_have_the_strides_of_one_process(kind: Any, recompute: int) -> None:
    check(*[kind] * 3, recompute=recompute)


class Marks(Layer):
    def forward(self, x: Tensor) -> Tensor:
        made: Any = super().forward(x)
        made.level = 1
        return made


class Tagged(Tensor):
    pass


class Tags(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).as_subclass(Tagged)


class Caches(Layer):
    def forward(self, x: Tensor, mask: Any) -> Tensor:
        if not hasattr(mask, "bias"):
            mask.bias = self.fc(mask)
        made: Tensor = super().forward(x)
        return made + mask.bias


class Differentiates(Layer):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        made: Tensor = super().forward(x)
        return made * mask.requires_grad_()


REFUSED = {
    "attribute": (Marks, "what it leaves has an attribute 'level'.*return y, level"),
    "class": (Tags, r"what it leaves is a Tagged.*y.as_subclass\(Tensor\)"),
    "extra": (Caches, "'mask' has an attribute 'bias'.*let each block find it"),
    "gradient": (Differentiates, "'mask' requires a gradient"),
}


@pytest.mark.parametrize("recompute", [0, 1])
@pytest.mark.parametrize(("kind", "words"), REFUSED.values(), ids=REFUSED)
def test_what_else_tensors_have_is_refused(kind: Any, words: str, recompute: int) -> None:
    extras = {"mask": torch.ones(8, WIDTH).double()} if kind in (Caches, Differentiates) else {}
    with pytest.raises(qs.MisfitError, match=words):
        check(build=lambda: [kind() for _ in range(3)], stages=2 - recompute, recompute=recompute, **extras)


class Bank(nn.Linear):
    """Attends to all inputs that it has had."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.bank: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        keys = torch.cat([*self.bank, x.detach()])
        self.bank.append(x.detach())
        return super().forward(x) + torch.softmax(x @ keys.t(), -1) @ keys


def test_what_a_stage_keeps_of_its_input_stays() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Bank()).double()
    x, y = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    batches = [(x * step, y) for step in range(1, 5)]
    losses = []
    for mesh in ("pp=2", "dp=1"):
        plan = qs.compile("1f1b", mesh=mesh, microbatches=2)
        losses.append(train_ranks(plan, list(model), F.mse_loss, torch.optim.SGD, batches)[-1].losses)
    assert losses[0] == losses[1]


def test_a_hook_that_comes_later_is_given_new_objects_and_hooks_on_these_go_with_them() -> None:
    """Stages of torch alone are given the same leaves in each step, but where code of users sees them."""
    plan, blocks = qs.compile("1f1b", mesh="pp=2", microbatches=4), [nn.Linear(3, 3), nn.Linear(3, 3)]
    x, y = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0))
    seen: list[Tensor] = []
    gradients: list[Tensor] = []

    def see(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0])
        if inputs[0].requires_grad:
            inputs[0].register_hook(gradients.append)

    def train(transport: Transport) -> list[float]:
        mine = deepcopy(blocks)
        engine = Engine(plan, mine, F.mse_loss, torch.optim.SGD, transport=transport)
        losses = [engine.step(x, y).loss.item() for _ in range(3)]
        if transport.rank == 1:
            handle = mine[1].register_forward_pre_hook(see)
        losses += [engine.step(x, y).loss.item() for _ in range(2)]
        if transport.rank == 1:
            handle.remove()
        return losses + [engine.step(x, y).loss.item() for _ in range(2)]

    found, _ = run_local(2, train)
    assert len({*map(id, seen)}) == len(seen) >= 2 * 4
    assert len(gradients) == 2 * 4
    expected = train_alone(nn.Sequential(*blocks), F.mse_loss, torch.optim.SGD, [(x, y)] * 7)
    assert found == pytest.approx(expected.losses, abs=1e-6)


def test_optimizers_see_attributes_of_weights_of_other_stages() -> None:
    def slower() -> nn.Sequential:
        made = model(Layer, Layer)
        for parameter in made[1].parameters():
            parameter.lr = 0.01  # type: ignore[attr-defined]
        return made

    check(build=slower)
