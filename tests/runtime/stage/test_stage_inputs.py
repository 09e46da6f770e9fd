"""Inputs of a stage look as in one process, apart from their numbers, and require a gradient where they do there."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quintsched as qs
from quintsched.runtime import Carry, split

from ...helpers.blocks import of_kind
from ...helpers.training import adamw, check_equality, random_batch, require_equal, train_alone, train_ranks

STEPS, WIDTH = 5, 4


class Layer(nn.Linear):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.stops = False

    def forward(self, x: Tensor, **extras: Tensor) -> Tensor:
        x = x.detach() if self.stops else x
        return x + torch.tanh(super().forward(x))


def model(*kinds: Callable[[], nn.Module]) -> list[nn.Module]:
    """Return a layer, blocks of these kinds, and a head."""
    torch.manual_seed(0)
    return [block.double() for block in (Layer(), *(kind() for kind in kinds), nn.Linear(WIDTH, 3))]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator).double(), torch.randint(0, 3, (8,), generator=generator)


Change = Callable[[list[nn.Module], int], object]


def check(
    build: Callable[[], Any],
    change: Change | None = None,
    mesh: str = "pp=2",
    *,
    optimizer: Any = adamw,
    masked: bool = False,
    **how: Any,
) -> None:
    """Train on stages as in one process, where that is possible."""
    plan = qs.compile(**{"schedule": "1f1b", **how}, mesh=mesh, microbatches=2)
    extras = {"mask": torch.ones(8, WIDTH).double()} if masked else {}
    batches = [(*batch(step), extras) for step in range(STEPS)]
    check_equality(plan, build(), nn.functional.cross_entropy, optimizer, batches, before=change)


def scaled(layer: Any, x: Tensor, is_whole: bool) -> Tensor:
    """Return what a layer makes of its input, or less."""
    made: Tensor = Layer.forward(layer, x)
    return made if is_whole else 0.6 * made


AsksForGraph = of_kind(Layer, lambda self, x: scaled(self, x, x.grad_fn is not None))
Transposed = of_kind(Layer, lambda self, x: scaled(self, x, x.is_contiguous()).t().contiguous().t())
Sliced = of_kind(Layer, lambda self, x: scaled(self, x, x.is_contiguous()).repeat(1, 2)[:, :WIDTH])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", [0, 2])
@pytest.mark.parametrize("kind", [AsksForGraph, Transposed, Sliced])
def test_inputs_of_stages_are_no_leaves_and_have_the_strides_of_one_process(kind: Any, recompute: int) -> None:
    check(partial(model, kind, kind, kind), recompute=recompute)


Asking = of_kind(Layer, lambda self, x: Layer.forward(self, x if x.requires_grad else 0.5 * x))
Reentrant = of_kind(Layer, lambda self, x: checkpoint(partial(Layer.forward, self), x, use_reentrant=True))
"""Trains where its input requires a gradient, and only there."""


class Codes(nn.Embedding):
    """Embeds the largest feature, through which no gradient goes."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.argmax(-1))


def ending(self: Any, x: Tensor) -> Tensor:
    output = Layer.forward(self, x)
    return output.detach() if self.stops else output


def freeze(blocks: list[nn.Module], step: int, *, count: int, since: int = 0, until: int = STEPS) -> None:
    for block in blocks[:count]:
        block.requires_grad_(not since <= step < until)


def stop(blocks: list[nn.Module], step: int, block: int = 3) -> None:
    setattr(blocks[block], "stops", step == 1)  # noqa: B010


class Two(nn.Module):
    """Gives a hidden state, and another tensor beside it, of its own weights or of the same."""

    def __init__(self, *, own: bool = True, rides: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.own, self.rides = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), own, rides

    def forward(self, x: Tensor) -> Any:
        h = self.a(self.b(x) if not self.own else x)
        c = self.b(x) if self.own else torch.tanh(h)
        return Carry(h, c=c) if self.rides else (h, c)


Looking = of_kind(Two, lambda self, x: (self.a(x) if x.sum().item() < 1e9 else x, x))
"""Looks at numbers, and hands on what it is given."""


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


class Marks(Layer):
    def forward(self, x: Tensor, **extras: Tensor) -> Tensor:
        made: Any = super().forward(x)
        made.level = 1
        return made


class Tagged(Tensor):
    pass


class Caches(Layer):
    def forward(self, x: Tensor, mask: Any) -> Tensor:  # type: ignore[override]
        if not hasattr(mask, "bias"):
            mask.bias = nn.Linear.forward(self, mask)
        made: Tensor = super().forward(x)
        return made + mask.bias


Tags = of_kind(Layer, lambda self, x: Layer.forward(self, x).as_subclass(Tagged))
Differentiates = of_kind(Layer, lambda self, x, mask: Layer.forward(self, x) * mask.requires_grad_())

NO_GRADIENT = r"blocks from \d on give no gradient .* freeze blocks 0 to \d"
UNUSED = r"no gradient to ('rider0'|'c'|\[1\]) of .* \(0\.(0\.)?b\.weight, 0\.(0\.)?b\.bias\)"
CHUNKS = {"schedule": "interleaved-1f1b", "chunks": 2, "change": partial(stop, block=2)}
SPLIT, MASKED = {"schedule": "zb-h1", "recompute": 1}, {"masked": True}
REFUSED: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
    "argmax": (partial(model, Layer, Codes, Codes), NO_GRADIENT, {}),
    "detach": (partial(model, Layer, Layer, Layer), NO_GRADIENT, {"change": stop}),
    "detached at the end of a stage": (partial(model, Layer, *[of_kind(Layer, ending)] * 2), NO_GRADIENT, CHUNKS),
    "tuple": (pair, UNUSED, {}),
    "dp": (pair, UNUSED, {"mesh": "dp=2,pp=2"}),
    "rider": (partial(pair, rides=True), UNUSED, {}),
    "split": (split_pair, UNUSED, SPLIT),
    "attribute": (partial(model, Marks, Marks), "what it leaves has an attribute 'level'.*return y, level", {}),
    "class": (partial(model, Tags, Tags), r"what it leaves is a Tagged.*y.as_subclass\(Tensor\)", {}),
    "extra": (partial(model, Caches, Caches), "'mask' has an attribute 'bias'.*let each block find it", MASKED),
    "gradient": (partial(model, Differentiates, Differentiates), "'mask' requires a gradient", MASKED),
}
ALONE = {"mesh": "pp=1", "recompute": 3}
REFUSED |= {f"{name}, run again": (*REFUSED[name][:2], REFUSED[name][2] | ALONE) for name in [*REFUSED][-4:]}


@pytest.mark.parametrize(("build", "words", "how"), REFUSED.values(), ids=REFUSED)
def test_what_the_next_stage_would_not_see_as_it_is_is_refused(build: Any, words: str, how: Any) -> None:
    with pytest.raises(qs.MisfitError, match=words):
        check(build, **how)


def frozen(blocks: list[nn.Module], step: int) -> None:
    for name, weight in blocks[0].named_parameters():
        weight.requires_grad_("b." not in name)


def in_turn(blocks: list[nn.Module], step: int) -> None:
    blocks[-1].uses = step % 2 == 0
    blocks[0].b.requires_grad_(step % 2 == 0)


EQUAL: dict[str, tuple[Any, Change | None, str]] = {
    "all before are frozen, asked": (partial(model, Layer, Asking, Asking), partial(freeze, count=2), "pp=2"),
    "for a while, asked": (partial(model, Layer, Asking, Asking), partial(freeze, count=2, since=1, until=3), "pp=2"),
    "for a while, reentrant": (
        partial(model, Layer, Reentrant, Reentrant),
        partial(freeze, count=2, since=2, until=4),
        "pp=2",
    ),
    "what is before an argmax is frozen": (partial(model, Layer, Codes, Codes), partial(freeze, count=3), "pp=2"),
    "unused, of the same weights": (partial(pair, own=False), None, "dp=2,pp=2"),
    "unused, split": (lambda: nn.Sequential(*pair(own=False)), None, "pp=2"),
    "unused, looks at numbers": (partial(pair, Looking), None, "pp=2"),
    "unused, frozen": (pair, frozen, "pp=2"),
    "unused in turn": (pair, in_turn, "pp=2"),
}


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("build", "change", "mesh"), EQUAL.values(), ids=EQUAL)
def test_it_trains_where_no_trained_weight_needs_a_gradient_of_it(build: Any, change: Change, mesh: str) -> None:
    check(build, change, mesh)


def test_a_hook_that_comes_later_is_given_new_objects_and_hooks_on_these_go_with_them() -> None:
    """Stages of torch alone are given the same leaves in each step, but where code of users sees them."""
    plan, blocks = (
        qs.compile("interleaved-1f1b", mesh="pp=2", microbatches=4),
        [nn.Linear(3, 3).double() for _ in range(4)],
    )
    batches, handles = [random_batch(0, 8, 3)] * 7, dict[int, Any]()
    seen: list[Tensor] = []
    gradients: list[Tensor] = []

    def see(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0])
        if inputs[0].requires_grad:
            inputs[0].register_hook(gradients.append)

    def change(own: Any, step: int) -> None:
        if step == 1:
            own[3].register_forward_pre_hook(lambda module, inputs: None)  # of another stage on this rank
        if step == 3:
            handles[id(own)] = own[1].register_forward_pre_hook(see)
        elif step == 5:
            handles[id(own)].remove()

    ranks = train_ranks(plan, blocks, nn.functional.mse_loss, torch.optim.SGD, batches, before=change)
    assert len({*map(id, seen)}) == len(seen) >= 2 * 4
    assert len(gradients) == 2 * 4
    require_equal(ranks, train_alone(blocks, nn.functional.mse_loss, torch.optim.SGD, batches))


def by_rates(parameters: Any) -> torch.optim.Optimizer:
    groups = [{"params": [p], "lr": getattr(p, "lr", 0.1)} for p in parameters]
    return torch.optim.SGD(groups, lr=0.1)


def test_optimizers_see_attributes_of_weights_of_other_stages() -> None:
    def slower() -> list[nn.Module]:
        made = model(Layer, Layer)
        for parameter in made[1].parameters():
            parameter.lr = 0.01  # type: ignore[attr-defined]
        return made

    check(slower, optimizer=by_rates)
