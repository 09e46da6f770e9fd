"""A step that some ranks cannot begin, or refuse: in one voice, or the fault of whose own code failed; what it says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.errors import CodeError, MisfitError, QuintschedError, StallError
from quintsched.runtime import Engine
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ..toys import CLASSES, sgd

FEATURES = 8


class Failing(nn.Module):
    """A layer that takes no units of so many samples."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self._samples = samples
        self.inner = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == self._samples:
            raise KeyError("no such token")
        return self.inner(x)


def errors_of(mesh: str, failing: tuple[int, ...], samples: int, features: int) -> dict[int, QuintschedError]:
    """Return what each rank raises where some take no such units, of 2 in training and 3 in evaluation."""
    told: dict[int, QuintschedError] = {}
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2)

    def work(transport: Transport) -> None:
        blocks = [nn.Identity, partial(Failing, samples if transport.rank in failing else 0)]
        engine = Engine(plan, blocks, cross_entropy_sum, sgd, transport=transport)
        inputs, targets = torch.ones(6, features), torch.zeros(6, dtype=torch.int64)
        try:
            engine.step(inputs[:4], targets[:4])
            engine.evaluate(inputs, targets)
        except QuintschedError as error:
            told[transport.rank] = error
            raise

    with pytest.raises(QuintschedError):
        run_local(plan.mesh.size, work, 20)
    return told


@pytest.mark.parametrize("samples", [2, 3])
@pytest.mark.parametrize(("mesh", "odd"), [("pp=2", 0), ("pp=2", 1), ("dp=2", 1), ("dp=2,pp=2", 2)])
def test_code_that_raises_on_one_rank_alone_is_that_ranks_own_error(mesh: str, odd: int, samples: int) -> None:
    told = errors_of(mesh, (odd,), samples, FEATURES)
    error = told.pop(odd)
    assert isinstance(error, CodeError)
    assert isinstance(error.__cause__, KeyError)
    assert str(error).startswith(f"rank {odd} (")
    assert f"), block 1 cannot take float32 ({samples}, 8): KeyError: 'no such token'" in str(error)
    assert told
    assert all(isinstance(theirs, StallError) and f"rank {odd}" in str(theirs) for theirs in told.values())


def squares(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square()


def in_place(output: Tensor, targets: Tensor) -> Tensor:
    return squares(output, targets.sub_(1)).mean()


def without_gradients(output: Tensor, targets: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    return squares(output, targets).mean()


ODD: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "in place": (in_place, "changes its targets or its output in place"),
    "a pair": (lambda o, t: (squares(o, t).sum(), o.numel()), "has given|has found"),
    "nothing": (lambda *_: None, "it gave a NoneType"),
    "a complex number": (lambda o, t: squares(o, t).mean() + 0j, "it gave complex128"),
    "a row": (lambda o, t: squares(o, t).mean(1), "it gave float64"),
    "a wide weight": (lambda o, t: (squares(o, t).sum(), torch.ones(3)), "is no weight|has given"),
    "switched off": (without_gradients, "gradients are switched off"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "steps"), [(name, n) for name in ODD for n in (0, 3) if (name, n) != ("in place", 3)])
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,pp=2"])
def test_all_ranks_hear_what_one_of_them_refuses_of_a_loss(mesh: str, steps: int, name: str) -> None:
    odd, said = ODD[name]
    plan = qs.compile("1f1b", mesh=mesh, microbatches=2)
    usual, far = torch.zeros(4, CLASSES, dtype=torch.float64), torch.full((4, CLASSES), 100.0, dtype=torch.float64)

    def loss_fn(output: Tensor, targets: Tensor) -> Any:
        return odd(output, targets) if targets.max() > 50 else squares(output, targets).mean()

    def work(transport: Transport) -> str:
        blocks = [partial(nn.Linear, FEATURES, FEATURES), partial(nn.Linear, FEATURES, CLASSES)]
        engine = Engine(plan, blocks, loss_fn, sgd, transport=transport, dtype=torch.float64)
        x = torch.ones(4, FEATURES, dtype=torch.float64)
        for _ in range(steps):
            engine.step(x, usual)
        before = engine.full_weights()
        try:
            with pytest.raises(MisfitError, match=said) as refused:
                engine.step(x, far.clone() if engine.replica else usual)
        finally:
            torch.set_grad_enabled(True)
        after = engine.full_weights()  # collective, as what a loop does then may be
        assert all(torch.equal(weight, before[key]) for key, weight in after.items())
        return str(refused.value)

    assert len({*run_local(plan.mesh.size, work)}) == 1


def test_an_evaluation_that_a_rank_refuses_is_refused_by_all_that_read_it() -> None:
    plan = qs.compile("1f1b", mesh="dp=2,pp=2", microbatches=2)

    def work(transport: Transport) -> None:
        blocks = [partial(nn.Linear, FEATURES, FEATURES), partial(nn.Linear, FEATURES, CLASSES)]
        loss = lambda o, t: None if t.max() > 50 else squares(o, t).mean()  # noqa: E731
        engine = Engine(plan, blocks, loss, sgd, transport=transport, dtype=torch.float64)
        x, usual = torch.ones(4, FEATURES, dtype=torch.float64), torch.zeros(4, CLASSES, dtype=torch.float64)
        for _ in range(3):
            engine.step(x, usual)
            assert engine.evaluate(x, usual).loss.isfinite()
        result = engine.evaluate(x, usual + 100 if engine.replica else usual)
        with pytest.raises(MisfitError, match=r"it gave a NoneType|some rank refuses it in its own words"):
            result.loss  # noqa: B018
        with pytest.raises(MisfitError, match="it gave a NoneType"):
            engine.step(x, usual)

    run_local(plan.mesh.size, work)


WEIGHT = torch.arange(1.0, 5)[:, None]
ROWS = torch.eye(4)


def by_a_permutation(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    return (output - targets["y"][targets["p"]]).square().mean()


CASES: dict[str, tuple[Any, Any, str]] = {
    "a weight": (nn.BCEWithLogitsLoss(weight=WEIGHT), ROWS[:, :2], r"\(BCEWithLogitsLoss\)\.weight \(4, 1\) is for"),
    "a closure": (lambda o, y, w=WEIGHT: (w * (o - y)).mean(), ROWS[:, :2], r"loss function\[0\] \(4, 1\) is for"),
    "columns": (lambda o, y: (o @ o.T - y).square().mean(), ROWS, r"samples, and targets \(2, 4\) is for the whole"),
    "a permutation": (by_a_permutation, {"y": ROWS[:, :2], "p": torch.tensor([3, 2, 1, 0])}, r"4 samples: give each"),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_of_the_whole_batch(name: str) -> None:
    loss, targets, words = CASES[name]
    plan = qs.compile("1f1b", mesh="dp=1", microbatches=2)
    engine = Engine(plan, [lambda: nn.Linear(3, 2)], loss, sgd)
    with pytest.raises(CodeError, match=f"here with 2 of this replica's .*{words}"):
        engine.step(torch.ones(4, 3), targets)
