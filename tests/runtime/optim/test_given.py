"""Optimizers step the same however they are given; those that cannot are refused with one line."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import quintsched as qs
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.optim.tensors_each_optimizer_needs import COUPLING_BY_CLASS, Coupling, coupling_of

from ...helpers.training import call_with_share, difference
from ..trials import engine_of
from .optimizers import Lamb, LargestNorm, Lookahead, SignMomentum, by_dims, squared


def blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double(), nn.Linear(4, 4).double(), nn.Linear(4, 4).double()]


def train(optimizer: Any, mesh: str = "dp=2,pp=2", zero: int = 1, steps: int = 3, **more: Any) -> list[dict[str, Any]]:
    """Train on all ranks, and return their weights; `optimizer` is made out of blocks where it is marked."""
    asked = {"zero": zero, "microbatches": 4 // qs.Mesh.parse(mesh).axis_size("dp"), "block_costs": [1.0] * 3, **more}
    random = torch.Generator().manual_seed(0)
    batch = torch.randn(2, 8, 4, generator=random, dtype=torch.float64)
    made = blocks()

    def run(transport: Transport) -> dict[str, Any]:
        mine = copy.deepcopy(made)
        given = optimizer.over(mine) if isinstance(optimizer, Over) else optimizer
        engine = engine_of(transport, mine, squared, mesh, optimizer=given, **asked)
        schedulers = engine.lr_schedulers(lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.5))
        for _ in range(steps):
            call_with_share(engine, engine.step, batch)
            schedulers.step()
        return dict(engine.full_weights())

    return run_local(qs.Mesh.parse(mesh).size, run, timeout_s=60)


class Over:
    """Makes an optimizer over the parameters of blocks."""

    def __init__(self, make: Any) -> None:
        self.over = lambda blocks: make([p for block in blocks for p in block.parameters()])


def decayed(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [{"params": parameters[:3], "weight_decay": 0.5}, {"params": parameters[3:], "lr": 0.02}], lr=0.01
    )


FORMS: dict[str, tuple[Any, Any]] = {
    "a class": (torch.optim.AdamW, lambda p: torch.optim.AdamW(p)),
    "a partial": (partial(torch.optim.AdamW, lr=0.02), lambda p: torch.optim.AdamW(p, lr=0.02)),
    "an instance": (Over(decayed), decayed),
    "an instance by dims": (Over(by_dims), by_dims),
    "an instance with state": (Over(torch.optim.Adagrad), torch.optim.Adagrad),
    "names": (lambda named: decayed([p for _, p in named]), decayed),
    "patterns": (
        {"0.*": partial(torch.optim.SGD, lr=0.1), "*.bias": torch.optim.Adam, "*": torch.optim.AdamW},
        lambda p: [torch.optim.SGD(p[:2], lr=0.1), torch.optim.Adam(p[3::2]), torch.optim.AdamW(p[2::2])],
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("mesh", "zero"), [("dp=2,pp=2", 1), ("dp=2", 0), ("dp=2", 3)])
def test_forms_give_the_same_steps(form: str, mesh: str, zero: int) -> None:
    given, plain = FORMS[form]
    expected = train(plain, "dp=1", 0)[0]
    for weights in train(given, mesh, zero):
        assert max(difference(weight, expected[name]) for name, weight in weights.items()) <= 1e-12


def spent(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    made = torch.optim.Adam(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    made.step()
    return made


def scheduled(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    made = torch.optim.Adam(parameters)
    torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
    return made


@pytest.mark.parametrize(
    ("given", "mesh", "words"),
    [
        (3, "dp=2", r"must be a function of parameters, such as optimizer=lambda params"),
        (lambda p: None, "dp=2", "returned a NoneType"),
        (torch.optim.LBFGS, "dp=2,pp=2", "LBFGS computes losses inside its step"),
        (torch.optim.SparseAdam, "dp=2", "SparseAdam wants sparse gradients"),
        (Over(spent), "dp=2", "has made steps already"),
        (Over(scheduled), "dp=2", r"engine\.lr_schedulers"),
        ({"0.*": torch.optim.Adam}, "dp=2", r"no pattern of the optimizers matches '1\.weight'"),
        ({"9.*": torch.optim.Adam, "*": torch.optim.Adam}, "dp=2", "first to match no weight"),
        (lambda p: torch.optim.Adam([nn.Parameter(torch.ones(2))]), "pp=2", "none of those"),
        (lambda p: [torch.optim.Adam(p), torch.optim.SGD(p)], "dp=2", "two optimizers step the same"),
    ],
)
def test_what_cannot_be_stepped_is_refused(given: Any, mesh: str, words: str) -> None:
    with pytest.raises(qs.UsageError, match=words):
        train(given, mesh, 0, steps=1)


@pytest.mark.parametrize(("mesh", "zero"), [("pp=2", 0), ("dp=2", 1), ("tp=2", 0)])
@pytest.mark.parametrize("told_by", ["identity", "class", "value"])
def test_groups_that_placeholders_would_change_are_refused(told_by: str, mesh: str, zero: int) -> None:
    class Head(nn.Parameter):
        pass

    def run(transport: Transport) -> None:
        mine = blocks()
        mine[2].weight = Head(mine[2].weight.data)
        rates = {
            "identity": lambda p: 0.5 if p is mine[2].weight else 0.1,
            "class": lambda p: 0.5 if isinstance(p, Head) else 0.1,
            "value": lambda p: float(p.detach().norm()),
        }
        build = lambda ps: torch.optim.SGD([{"params": [p], "lr": rates[told_by](p)} for p in ps])  # noqa: E731
        engine_of(transport, mine, squared, mesh, optimizer=build, zero=zero, block_costs=[1.0] * 3)

    with pytest.raises(qs.MisfitError, match=r"other options .* group parameters by name, optimizer=lambda named"):
        run_local(2, run, timeout_s=60)


def stand_ins() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(()).expand(64, 32)), nn.Parameter(torch.zeros(()).expand(64))]


class WithOwnStep(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


class WithOwnGroups(torch.optim.SGD):
    def _init_group(self, *given: Any) -> Any:
        return super()._init_group(*given)  # type: ignore[misc]


def said(needs_whole: bool) -> Callable[[Any], Optimizer]:
    def build(parameters: Any) -> Optimizer:
        made = WithOwnStep(parameters)
        made.needs_whole_parameters = needs_whole  # type: ignore[attr-defined]
        return made

    return build


CASES: dict[str, tuple[Callable[[list[nn.Parameter]], Optimizer], Coupling | None]] = {
    "adamw": (torch.optim.AdamW, Coupling.NONE),
    "foreach": (lambda p: torch.optim.AdamW(p, foreach=True), Coupling.NONE),
    "fused": (lambda p: torch.optim.SGD(p, fused=True), Coupling.NONE),
    "a subclass that makes state as it is built": (type("Ada", (torch.optim.Adagrad,), {}), Coupling.NONE),
    "an own step": (WithOwnStep, None),
    "an own method of its step": (WithOwnGroups, None),
    "adafactor": (torch.optim.Adafactor, Coupling.WITHIN),
    "muon": (lambda p: torch.optim.Muon(p[:1]), Coupling.WITHIN),
    "said no": (SignMomentum, Coupling.NONE),
    "said yes": (Lamb, Coupling.WITHIN),
    "said of an instance": (said(True), Coupling.WITHIN),
    "said no of an instance": (said(False), Coupling.NONE),
    "said with the norm": (partial(Lamb, clip=0.3), Coupling.WITHIN | Coupling.NORM),
    "not said": (LargestNorm, None),
    "wrapped": (lambda p: Lookahead(torch.optim.AdamW(p)), None),
}


@pytest.mark.parametrize("name", CASES)
def test_classes_say_what_updates_depend_on(name: str) -> None:
    build, expected = CASES[name]
    assert coupling_of(build(stand_ins())) == expected


def test_every_optimizer_of_torch_is_known_or_refused() -> None:
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)]
    others = {kind.__name__ for kind in kinds if kind not in COUPLING_BY_CLASS}
    assert others == {"Optimizer", "LBFGS", "SparseAdam"}


def test_an_instance_is_refused_once_an_engine_has_made_its_own_from_it() -> None:
    layer = nn.Linear(2, 2)
    given = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        engine = engine_of(None, [layer], squared, "dp=1", optimizer=given)
        given.zero_grad()
        engine.step(torch.ones(2, 2), torch.ones(2, 2))
    for use in (
        lambda: given.param_groups[0],
        lambda: torch.optim.lr_scheduler.ExponentialLR(given, 0.5),
        given.step,
        given.state_dict,
        lambda: given.register_step_post_hook(print),
    ):
        with pytest.raises(qs.UsageError, match=r"this SGD is not what trains: .*engine\.optimizers\.values\(\)"):
            use()
    assert engine.optimizers[0,].param_groups[0]["lr"] == 0.1


def test_segments_are_refused_to_who_wants_whole_parameters() -> None:
    with pytest.raises(qs.MisfitError, match="zero_split='parameter'"):
        train(torch.optim.Adafactor, "dp=2", 1, zero_split="element")


def test_several_are_one_to_schedulers_and_state() -> None:
    optimizer = {"*.bias": torch.optim.SGD, "*": torch.optim.Adam}
    engine = engine_of(None, blocks(), squared, "pp=1", optimizer=optimizer)
    assert [len(group["params"]) for group in engine.optimizer.param_groups] == [3, 3]
    scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 0.5**step)
    engine.step(torch.ones(2, 4, dtype=torch.float64), torch.ones(2, 4, dtype=torch.float64))
    scheduler.step()
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.5e-3, 0.5e-3]
    assert "optimizer.1.weight.exp_avg" in engine.state_dict()
