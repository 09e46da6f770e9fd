"""A step that some ranks cannot begin, or refuse: in one voice, or the fault of whose own code failed; what it says."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine, Transport, run_local
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ...helpers.blocks import of_kind
from ..toys import CLASSES
from ..trials import engine_of, on_ranks, refused, step

FEATURES = 8


class Failing(nn.Linear):
    """A layer that takes no units of so many samples."""

    samples = 0

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == self.samples:
            raise KeyError("no such token")
        return super().forward(x)


@pytest.mark.parametrize("samples", [2, 3])
@pytest.mark.parametrize(("mesh", "odd"), [("pp=2", 0), ("pp=2", 1), ("dp=2,pp=2", 2)])
def test_code_that_raises_on_one_rank_alone_is_that_ranks_own_error(mesh: str, odd: int, samples: int) -> None:
    """Units that it does not take have 2 samples in training and 3 in evaluation."""
    told: dict[int, qs.QuintschedError] = {}

    def work(transport: Transport) -> None:
        layer = Failing(FEATURES, CLASSES)
        layer.samples = samples if transport.rank == odd else 0
        engine = engine_of(transport, [nn.Identity, layer], cross_entropy_sum, mesh)
        inputs, targets = torch.ones(6, FEATURES), torch.zeros(6, dtype=torch.int64)
        try:
            engine.step(inputs[:4], targets[:4])
            engine.evaluate(inputs, targets)
        except qs.QuintschedError as error:
            told[transport.rank] = error
            raise

    with pytest.raises(qs.QuintschedError):
        run_local(qs.Mesh.parse(mesh).size, work, 20)
    error = told.pop(odd)
    assert isinstance(error, qs.CodeError)
    assert isinstance(error.__cause__, KeyError)
    assert str(error).startswith(f"rank {odd} (")
    assert f"), block 1 cannot take float32 ({samples}, 8): KeyError: 'no such token'" in str(error)
    assert told
    assert all(isinstance(theirs, qs.StallError) and f"rank {odd}" in str(theirs) for theirs in told.values())


def squares(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square()


def without_gradients(output: Tensor, targets: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    return squares(output, targets).mean()


ODD: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "in place": (lambda o, t: squares(o, t.sub_(1)).mean(), "changes its targets or its output in place"),
    "a pair": (lambda o, t: (squares(o, t).sum(), o.numel()), "has given|has found"),
    "nothing": (lambda *_: None, "it gave a NoneType"),
    "a complex number": (lambda o, t: squares(o, t).mean() + 0j, "it gave complex128"),
    "a row": (lambda o, t: squares(o, t).mean(1), "it gave float64"),
    "a wide weight": (lambda o, t: (squares(o, t).sum(), torch.ones(3)), "is no weight|has given"),
    "switched off": (without_gradients, "gradients are switched off"),
}


BLOCKS = [partial(nn.Linear, FEATURES, FEATURES), partial(nn.Linear, FEATURES, CLASSES)]
INPUTS = torch.ones(8, FEATURES, dtype=torch.float64)
USUAL = torch.zeros(8, CLASSES, dtype=torch.float64)
FAR = USUAL + 100 * (torch.arange(8) > 3)[:, None]
"""Targets of which the second replica's are unlike all before."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "steps"), [(name, n) for name in ODD for n in (0, 3) if (name, n) != ("in place", 3)])
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,pp=2"])
def test_all_ranks_hear_what_one_of_them_refuses_of_a_loss(mesh: str, steps: int, name: str) -> None:
    odd, said = ODD[name]

    def loss_fn(output: Tensor, targets: Tensor) -> Any:
        return odd(output, targets) if targets.max() > 50 else squares(output, targets).mean()

    batches = [(INPUTS, USUAL)] * steps + [(INPUTS, FAR)]
    assert re.search(said, refused(BLOCKS, batches, loss_fn, mesh, dtype=torch.float64))


def test_an_evaluation_that_a_rank_refuses_is_refused_by_all_that_read_it() -> None:
    def work(engine: Engine) -> None:
        half = slice(4 * engine.replica, 4 * engine.replica + 4)
        for _ in range(3):
            engine.step(INPUTS[half], USUAL[half])
            assert engine.evaluate(INPUTS[half], USUAL[half]).loss.isfinite()
        result = engine.evaluate(INPUTS[half], FAR[half])
        with pytest.raises(qs.MisfitError, match=r"it gave a NoneType|some rank refuses it in its own words"):
            result.loss  # noqa: B018
        with pytest.raises(qs.MisfitError, match="it gave a NoneType"):
            engine.step(INPUTS[half], USUAL[half])

    loss = lambda o, t: None if t.max() > 50 else squares(o, t).mean()  # noqa: E731
    on_ranks(work, BLOCKS, loss, mesh="dp=2,pp=2", dtype=torch.float64)


def stays(x: Tensor) -> Tensor:
    """Return what is given, or end the process where that has a large number."""
    if not x.is_meta and float(x.detach().max()) > 50:
        raise SystemExit(0)
    return x


Leaving = of_kind(nn.Linear, lambda self, x: nn.Linear.forward(self, stays(x)))


Looking = of_kind(nn.Linear, lambda self, x: nn.Linear.forward(self, x) * (2 if x.sum().item() > 0 else 1))


@pytest.mark.parametrize(("samples", "said"), [(9, "as many samples, in every step"), (8, ""), (10, "")])
def test_replicas_that_gather_weights_for_trial_runs_need_equally_many(samples: int, said: str) -> None:
    batch, how = torch.ones(samples, FEATURES), {"mesh": "dp=2,pp=2", "microbatches": 2, "zero": 3}
    ranks = step([Looking(FEATURES, FEATURES) for _ in range(2)], [(batch, batch)], **how)
    assert all(said in str(*losses) and isinstance(*losses, str if said else float) for losses in ranks)


@pytest.mark.parametrize("mode", ["step", "evaluate"])
@pytest.mark.parametrize("of_loss", [False, True])
def test_an_exit_in_code_that_is_called_is_an_error_of_its_rank(mode: str, of_loss: bool) -> None:
    def work(engine: Engine) -> None:
        few, many = torch.ones(4, 4), torch.full((4, 4), 100.0)
        for _ in range(2):
            engine.step(few, few)
            engine.evaluate(few, few)
        getattr(engine, mode)(few if of_loss else many, many)

    where = "the loss function raised" if of_loss else r"rank 0 \(pp=0\), stage 0, block 0 \(Linear\):"
    with pytest.raises(qs.CodeError, match=f"{where} SystemExit: 0"):
        on_ranks(work, lambda: [Leaving(4, 4), nn.Linear(4, 4)], lambda o, t: squares(o, stays(t)).mean())


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("calls", [("step", "evaluate"), ("evaluate", "step"), ("full_state_dict", "save_dcp")])
def test_unlike_calls_that_meet_are_named_with_their_ranks(calls: tuple[str, str], steps: int, tmp_path: Path) -> None:
    def work(engine: Engine) -> None:
        batch = torch.ones(4, FEATURES), torch.zeros(4, dtype=torch.int64)
        for _ in range(steps):
            engine.step(*batch)
            engine.evaluate(*batch)
        given = {"step": batch, "evaluate": batch, "full_state_dict": (), "save_dcp": (tmp_path / "saved",)}
        getattr(engine, call := calls[engine.transport.rank])(*given[call])

    with pytest.raises(qs.MisfitError) as refused:
        on_ranks(work, BLOCKS, cross_entropy_sum)
    assert all(call in str(refused.value) for call in calls)
    assert str(refused.value).endswith("let all ranks make the same calls, in the same order")


WEIGHT = torch.arange(1.0, 5)[:, None]
ROWS = torch.eye(4)


CASES: dict[str, tuple[Any, Any, str]] = {
    "a weight": (nn.BCEWithLogitsLoss(weight=WEIGHT), ROWS[:, :2], r"\(BCEWithLogitsLoss\)\.weight \(4, 1\) is for"),
    "a closure": (lambda o, y, w=WEIGHT: (w * (o - y)).mean(), ROWS[:, :2], r"loss function\[0\] \(4, 1\) is for"),
    "columns": (lambda o, y: (o @ o.T - y).square().mean(), ROWS, r"samples, and targets \(2, 4\) is for the whole"),
    "a permutation": (
        lambda o, t: (o - t["y"][t["p"]]).square().mean(),
        {"y": ROWS[:, :2], "p": torch.tensor([3, 2, 1, 0])},
        r"4 samples: give each",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_of_the_whole_batch(name: str) -> None:
    loss, targets, words = CASES[name]
    engine = engine_of(None, [lambda: nn.Linear(3, 2)], loss, "dp=1")
    with pytest.raises(qs.CodeError, match=f"here with 2 of this replica's .*{words}"):
        engine.step(torch.ones(4, 3), targets)
