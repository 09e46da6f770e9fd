"""Optimizers of every kind, and their step hooks, give the numbers of one process; those that cannot are refused.

Some clip by the norm of all gradients themselves, where ranks have some of the parameters. Some do not say what their
steps depend on: then one replica steps all, and a mesh on which ranks have shares of weights is refused.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.optim import step_on_gathered_matrices
from quintsched.runtime.optim.accepted_optimizer_forms import parameters_of

from ..toys import Outcome, ids_task, tiny_gpt, train_on, train_plainly, worst_difference
from ..trials import on_ranks
from .optimizers import (
    ClippingAdamW,
    Lamb,
    LargestNorm,
    Lars,
    Lookahead,
    Shampoo,
    SignMomentum,
    adafactor,
    by_dims,
    by_shape,
    gradients,
    hooked,
    muon,
    plain,
    scaling,
)

TASK = ids_task(3, 8, 8)
NAMES = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop")
TORCHS: dict[str, Callable[..., Any]] = {name: partial(getattr(torch.optim, name), lr=0.01) for name in NAMES}


def warming_up() -> Any:
    steps: list[int] = []
    return scaling(lambda found: [min(1.0, len(steps) / 3)] * len(found) if steps.append(1) is None else [])


def clipping_by_history() -> Any:
    norms: list[float] = []

    def factors(found: list[torch.Tensor]) -> list[float]:
        norms.append(float(torch.stack([gradient.norm() for gradient in found]).norm()))
        return [min(1.0, float(torch.tensor(norms).quantile(0.3)) / norms[-1])] * len(found)

    return scaling(factors)


def clip(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    nn.utils.clip_grad_norm_(gradients(optimizer), 0.1)


EACH, NORM = {"needs_whole_parameters": False}, {"needs_whole_parameters": False, "needs_gradient_norm": True}
UNSAID: dict[str, Callable[..., Any]] = {
    "largest norm": LargestNorm,
    "lookahead": lambda p: Lookahead(AdamW(p, lr=1e-3)),
    "two, of which one is not said": lambda p: [
        LargestNorm([one for one in p if one.dim() > 1]),
        Lars([one for one in p if one.dim() < 2]),
    ],
    "a hook by places": hooked(lambda: scaling(lambda found: [0.8**n for n in range(len(found))])),
}
BUILDS: dict[str, Callable[..., Any]] = {
    "by dims": by_dims,
    "by shape": by_shape,
    "muon": muon,
    "adafactor": adafactor,
    "shampoo": Shampoo,
    "sign momentum": SignMomentum,
    "lamb": Lamb,
    "lamb that clips": partial(Lamb, clip=0.3),
    "lars": Lars,
    "lars that clips": partial(Lars, clip=0.3),
    "AdamW that clips": ClippingAdamW,
    "a hook that clips": hooked(lambda: clip, partial(SGD, momentum=0.9), **NORM),
    "a hook that counts": hooked(warming_up, **EACH),
    "a hook with a history": hooked(clipping_by_history, **NORM),
    "a hook on one that makes state as it is built": hooked(
        lambda: lambda optimizer, *_: nn.utils.clip_grad_value_(gradients(optimizer), 0.01),
        partial(Adagrad, eps=1e-3),
        **EACH,
    ),
}
PLANS = [
    *(("dp=2", zero) for zero in (0, 1, 2, 3)),
    *(("dp=2,pp=2", zero) for zero in (0, 1, 3)),
    *(("dp=2,tp=2", zero) for zero in (0, 2, 3)),
    *(("tp=2", 0), ("pp=2", 0), ("tp=2,pp=2", 0)),
]


CASES = [
    *((name, mesh, zero) for name in BUILDS for mesh, zero in PLANS),
    *((name, "dp=2,pp=2", 1) for name in TORCHS),  # in segments
]


def train(plan: qs.Plan, build: Any, clip: float | None = None) -> list[Outcome]:
    return train_on(plan, TASK, tiny_gpt(8, depth=2), build, clip, 0.004, torch.float64)


@cache
def alone(name: str, clip: float | None = None) -> Outcome:
    return train_plainly(TASK, tiny_gpt(8, depth=2), 4, plain((BUILDS | TORCHS | UNSAID)[name]), clip, torch.float64)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "mesh", "zero"), CASES)
def test_optimizers_equal_one_process(name: str, mesh: str, zero: int) -> None:
    found = train(qs.compile("1f1b", mesh=mesh, microbatches=2, zero=zero), (BUILDS | TORCHS)[name])
    assert worst_difference(found, alone(name)) <= 1e-9


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("mesh", "zero"), PLANS)
@pytest.mark.parametrize("name", UNSAID)
def test_what_is_not_said_is_stepped_by_one_replica_or_refused(name, mesh, zero, caplog):
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2, zero=zero)
    if mesh != "dp=2":
        with pytest.raises(qs.MisfitError, match=r"does not say .*needs_whole_parameters = False"):
            train(plan, UNSAID[name])
        return
    assert worst_difference(train(plan, UNSAID[name]), alone(name)) <= 1e-9
    assert (".needs_whole_parameters = True or False to share them out" in caplog.text) == (zero > 0)


class Noisy(Lars):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in gradients(self):
            p.add_(torch.randn_like(p))


def of_some_parameters(parameters: Any) -> list[Optimizer]:
    return [ClippingAdamW([p for p in parameters if p.dim() > 1]), SGD([p for p in parameters if p.dim() < 2])]


def with_own_parameters(parameters: Any) -> Optimizer:
    some = list(parameters)
    return hooked(lambda: lambda *_: nn.utils.clip_grad_norm_(some, 0.1) and None)(some)  # type: ignore[no-any-return]


MODEL = nn.Linear(2, 2)


def by_a_global(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    nn.utils.clip_grad_norm_(MODEL.parameters(), 1.0)


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (of_some_parameters, qs.MisfitError, r"depends on all parameters, .* let the engine clip \(clip=…\)"),
        (with_own_parameters, qs.UsageError, r"a step hook of SGD has parameters .* lambda optimizer, args, kwargs"),
        (hooked(lambda: by_a_global), qs.UsageError, "a step hook of SGD has parameters or modules by itself"),
        (Noisy, qs.UsageError, "Noisy draws random numbers"),
    ],
)
def test_what_ranks_cannot_step_is_refused(build: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        train(qs.compile("1f1b", mesh="pp=2", microbatches=2), build)


def stepping_itself(parameters: Any) -> SGD:
    made = SGD(parameters, lr=0.1)
    made.step = partial(SGD.step, made)  # type: ignore[method-assign]
    return made


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["pp=2", "dp=2"])
def test_steps_and_hooks_set_on_an_optimizer_are_known_to_the_engine_or_refused(mesh: str) -> None:
    def work(engine: Engine, *, declared: bool) -> None:
        for optimizer in engine.optimizers.values():
            optimizer.register_step_pre_hook(lambda *_: None)
            if declared:
                optimizer.needs_whole_parameters = False  # type: ignore[attr-defined]
        engine.step(torch.ones(2, 4), torch.ones(2, 4))

    given: dict[str, Any] = {"mesh": mesh, "zero": int(mesh == "dp=2"), "microbatches": 1}
    plan = qs.compile("1f1b", **given)
    on_ranks(partial(work, declared=True), [partial(nn.Linear, 4, 4)] * 2, **given)
    with pytest.raises(qs.UsageError, match="has others than when the engine was built"):
        on_ranks(partial(work, declared=False), [partial(nn.Linear, 4, 4)] * 2, **given)
    hook_of_all = register_optimizer_step_pre_hook(clip)
    try:
        if mesh == "pp=2":
            with pytest.raises(qs.MisfitError, match="SGD with its step hooks does not say"):
                train(plan, partial(SGD, lr=0.1))
        else:
            expected = train_plainly(TASK, tiny_gpt(8, depth=2), 4, partial(SGD, lr=0.1), dtype=torch.float64)
            assert worst_difference(train(plan, partial(SGD, lr=0.1)), expected) <= 1e-9
    finally:
        hook_of_all.remove()
    with pytest.raises(qs.UsageError, match="step is replaced on the optimizer itself"):
        train(plan, stepping_itself)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [*TORCHS.values(), partial(torch.optim.Adafactor, lr=0.01)])
def test_large_weights_are_stepped_in_pieces_to_the_same_bits(kind, monkeypatch):
    sizes, cut = list[int](), step_on_gathered_matrices._cut_groups

    def counted(groups: Any, pieces: int) -> Any:
        for some in cut(groups, pieces):
            sizes.append(len(some[0]["params"]))
            yield some

    def made() -> Optimizer:
        random = torch.Generator().manual_seed(0)
        found = [nn.Parameter(torch.randn(2**9, 2**11, generator=random)) for _ in range(3)]
        for parameter in found:
            parameter.grad = torch.randn(parameter.shape, generator=random)
        return kind([{"params": found[:2]}, {"params": found[2:], "weight_decay": 0.1}])

    monkeypatch.setattr(step_on_gathered_matrices, "_cut_groups", counted)
    ours, its = step_on_gathered_matrices.Stepper(made(), ()), made()
    groups, unlike = ours.optimizer.param_groups, list[object]()
    for _ in range(2):
        ours.step_weights()
        its.step()
    assert sizes == [1, 1, 1] * 2
    assert ours.optimizer.param_groups is groups
    for mine, other in zip(parameters_of(ours.optimizer), parameters_of(its), strict=True):
        assert torch.equal(mine, other)
        kept = ours.optimizer.state[mine]
        unlike += [n for n, v in its.state[other].items() if str(v) != str(kept[n])]
    assert not unlike
