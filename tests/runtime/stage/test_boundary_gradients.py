"""Tensors between stages require a gradient as in one process; a stage that returns none is refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import quintsched as qs
from quintsched.runtime import Carry, split

from ...helpers.training import adamw, check_equality

STEPS, WIDTH = 5, 4


class Layer(nn.Linear):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.stops = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach() if self.stops else x
        return x + torch.tanh(super().forward(x))


class Asking(Layer):
    """Goes by whether it is given something that requires a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.requires_grad else 0.5 * x)


class Reentrant(Layer):
    """Trains where its input requires a gradient, and only there."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(super().forward, x, use_reentrant=True)
        return output


class Codes(nn.Embedding):
    """Embeds the largest feature, through which no gradient goes."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.argmax(-1))


def model(kind: Callable[[], nn.Module] = Layer) -> list[nn.Module]:
    torch.manual_seed(0)
    return [block.double() for block in (Layer(), Layer(), kind(), kind(), nn.Linear(WIDTH, 3))]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator).double(), torch.randint(0, 3, (8,), generator=generator)


Change = Callable[[list[nn.Module], int], object]


def check(build: Callable[[], list[nn.Module]], change: Change, mesh: str = "pp=2", **how: Any) -> None:
    """Train on stages as in one process, where that is possible."""
    plan = qs.compile(**{"schedule": "1f1b", **how}, mesh=mesh, microbatches=2)
    batches = [batch(step) for step in range(STEPS)]
    check_equality(plan, build(), F.cross_entropy, adamw, batches, before=change)


def freeze(blocks: list[nn.Module], step: int, *, count: int, since: int = 0, until: int = STEPS) -> None:
    for block in blocks[:count]:
        block.requires_grad_(not since <= step < until)


def stop(blocks: list[nn.Module], step: int, block: int = 3) -> None:
    setattr(blocks[block], "stops", step == 1)  # noqa: B010


class Ending(Layer):
    """A layer whose output may be detached."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output.detach() if self.stops else output


NO_GRADIENT = {
    "argmax": (Codes, lambda *_: None, {}),
    "detach": (Layer, stop, {}),
    "detached at the end of a stage": (Ending, partial(stop, block=2), {"schedule": "interleaved-1f1b", "chunks": 2}),
}


@pytest.mark.parametrize(("kind", "change", "how"), NO_GRADIENT.values(), ids=NO_GRADIENT)
def test_a_stage_that_gives_no_gradient_back_is_refused(kind: Any, change: Any, how: Any) -> None:
    with pytest.raises(qs.MisfitError, match=r"blocks from \d on give no gradient .* freeze blocks 0 to \d"):
        check(partial(model, kind), change, **how)


class Two(nn.Module):
    """Gives a hidden state, and another tensor beside it, of its own weights or of the same."""

    def __init__(self, *, own: bool = True, rides: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.own, self.rides = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), own, rides

    def forward(self, x: Tensor) -> Any:
        h = self.a(self.b(x) if not self.own else x)
        c = self.b(x) if self.own else torch.tanh(h)
        return Carry(h, c=c) if self.rides else (h, c)


class Looking(Two):
    """Looks at numbers, and hands on what it is given."""

    def forward(self, x: Tensor) -> Any:
        return self.a(x) if x.sum().item() < 1e9 else x, x


class Head(nn.Linear):
    """Takes both; uses the second in some steps."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 3)
        self.uses = False

    def forward(self, given: Any, c: Tensor | None = None) -> Tensor:
        h, c = given if c is None else (given, c)
        return super().forward(h + c if self.uses else h)


def pair(kind: type[Two] = Two, **how: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    return [kind(**how).double(), Head().double()]


def split_pair(**kind: bool) -> list[nn.Module]:
    return [*split(nn.Sequential(*pair(**kind)), blocks=["0", "1"], example=batch(0)[0])]


REFUSED: dict[str, tuple[Callable[[], list[nn.Module]], dict[str, Any]]] = {
    "tuple": (pair, {}),
    "dp": (pair, {"mesh": "dp=2,pp=2"}),
    "rider": (partial(pair, rides=True), {}),
    "split": (split_pair, {"schedule": "zb-h1", "recompute": 1}),
}


@pytest.mark.parametrize(("build", "how"), REFUSED.values(), ids=REFUSED)
def test_a_tensor_that_nobody_uses_is_refused_where_weights_need_it(build: Any, how: Any) -> None:
    words = r"no gradient to ('rider0'|'c'|\[1\]) of .* \(0\.(0\.)?b\.weight, 0\.(0\.)?b\.bias\)"
    with pytest.raises(qs.MisfitError, match=words):
        check(build, lambda *_: None, **how)


def frozen(blocks: list[nn.Module], step: int) -> None:
    for name, weight in blocks[0].named_parameters():
        weight.requires_grad_("b." not in name)


def in_turn(blocks: list[nn.Module], step: int) -> None:
    blocks[-1].uses = step % 2 == 0
    blocks[0].b.requires_grad_(step % 2 == 0)


EQUAL: dict[str, tuple[Any, Change, str]] = {
    "all before are frozen, asked": (partial(model, Asking), partial(freeze, count=2), "pp=2"),
    "for a while, asked": (partial(model, Asking), partial(freeze, count=2, since=1, until=3), "pp=2"),
    "for a while, reentrant": (partial(model, Reentrant), partial(freeze, count=2, since=2, until=4), "pp=2"),
    "what is before an argmax is frozen": (partial(model, Codes), partial(freeze, count=3), "pp=2"),
    "unused, of the same weights": (partial(pair, own=False), lambda *_: None, "dp=2,pp=2"),
    "unused, split": (lambda: nn.Sequential(*pair(own=False)), lambda *_: None, "pp=2"),
    "unused, looks at numbers": (partial(pair, Looking), lambda *_: None, "pp=2"),
    "unused, frozen": (pair, frozen, "pp=2"),
    "unused in turn": (pair, in_turn, "pp=2"),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("build", "change", "mesh"), EQUAL.values(), ids=EQUAL)
def test_it_trains_where_no_trained_weight_needs_a_gradient_of_it(build: Any, change: Change, mesh: str) -> None:
    check(build, change, mesh)
