"""Inputs of a stage look the same to programs as in one process, apart from their numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime.engine import Engine

from ...helpers.training import check_equality

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


Around = Callable[[], AbstractContextManager[object]]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    groups = [{"params": [p], "lr": getattr(p, "lr", 0.1)} for p in parameters]
    return torch.optim.SGD(groups, lr=0.1)


def check(
    *kinds: type[nn.Module],
    build: Callable[[], Any] | None = None,
    around: Around = nullcontext,
    schedule: str = "1f1b",
    stages: int = 2,
    recompute: int = 0,
    **extras: Tensor,
) -> None:
    """Train blocks of these kinds, with a layer before them and a head, on stages as in one process."""
    plan = qs.compile(schedule, mesh=f"pp={stages}", microbatches=2, recompute=recompute)
    batches = [(*batch(step), {name: extra.clone() for name, extra in extras.items()}) for step in range(STEPS + 1)]
    blocks = list((build or partial(model, *kinds))())
    check_equality(plan, blocks, F.cross_entropy, sgd, batches, around=around)


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


class Expanded(Layer):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(x) * (1.0 if x.is_contiguous() else 0.6)
        return made.mean(1, keepdim=True).expand(-1, WIDTH)


class PassesTwo(Layer):
    """Hands on two tensors, of which the second does not lie in memory in order."""

    def forward(self, given: Any) -> Any:
        x, other = given if isinstance(given, tuple) else (given, given.t().contiguous().t())
        return super().forward(x) * (1.0 if other.is_contiguous() else 0.6), other


class JoinsTwo(PassesTwo):
    def forward(self, given: Any) -> Any:
        return sum(super().forward(given))


STRIDED = {
    "transposed": [Transposed] * 3,
    "sliced": [Sliced] * 3,
    "expanded": [Expanded] * 3,
    "one of two": [PassesTwo, PassesTwo, JoinsTwo],
}


@pytest.mark.parametrize("recompute", [0, 2])
def test_inputs_of_stages_are_no_leaves(recompute: int) -> None:
    check(*[AsksForGraph] * 3, recompute=recompute)


@pytest.mark.parametrize("recompute", [0, 1])
@pytest.mark.parametrize("kinds", STRIDED.values(), ids=STRIDED)
def test_strides_are_as_in_one_process(kinds: Any, recompute: int) -> None:
    check(*kinds, recompute=recompute)


class Permuted(Layer):
    """Lies in memory otherwise than the meta device says."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(x)
        return made if x.is_meta else made.t().contiguous().t()


def test_the_log_says_where_strides_are_others_than_foretold(caplog: pytest.LogCaptureFixture) -> None:
    check(Permuted, Permuted)
    assert "leaves a tensor with strides (1, 4), and left one with others" in caplog.text


class Marks(Layer):
    def forward(self, x: Tensor) -> Tensor:
        made: Any = super().forward(x)
        made.level = 1
        return made


class SeesMarks(Layer):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = super().forward(x)
        return made * getattr(x, "level", 0.6)


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
    with pytest.raises(MisfitError, match=words):
        check(build=lambda: [kind() for _ in range(3)], stages=2 - recompute, recompute=recompute, **extras)


def test_attributes_may_be_seen_within_a_stage() -> None:
    for stages in (1, 2):
        check(Layer, Layer, Marks, SeesMarks, stages=stages)


def test_batches_have_no_attributes() -> None:
    plan = qs.compile("1f1b", mesh="pp=1", microbatches=2)
    engine, (inputs, targets) = Engine(plan, list(model(Layer)), F.cross_entropy, sgd), batch(0)
    inputs.level = 2  # type: ignore[attr-defined]
    with pytest.raises(MisfitError, match=r"inputs has an attribute 'level'.*engine.step\(…, level=…\)"):
        engine.step(inputs, targets)


class Scales(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return 0.9 * made if func is F.linear else made


def test_modes_see_linear_layers_with_split_backwards() -> None:
    check(Layer, Layer, around=Scales, schedule="zb-h1")


def test_optimizers_see_attributes_of_weights_of_other_stages() -> None:
    def slower() -> nn.Sequential:
        made = model(Layer, Layer)
        for parameter in made[1].parameters():
            parameter.lr = 0.01  # type: ignore[attr-defined]
        return made

    check(build=slower)
