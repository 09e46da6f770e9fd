"""A trainer of one's own objects: equal to a loop by hand, resumed, and refused where something is missing."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import quintsched as qs
from quintsched.runtime import JobConfig, Trainer, run_local, split
from quintsched.runtime.train.reporter import Reporter

from ...helpers.training import Outcome, require_equal, train_alone

EPOCHS, BATCH, RATE = 2, 8, 1e-2


def data(samples: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(3, (samples,), generator=generator))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batches(replica: int, replicas: int) -> DataLoader[Any]:
    """Return a replica's share of batches in the order of the samples, without draws that threads share."""
    sampler: DistributedSampler[Any] = DistributedSampler(data(), replicas, replica, shuffle=False)
    return DataLoader(data(), BATCH // replicas, sampler=sampler, generator=torch.Generator())


adamw = partial(torch.optim.AdamW, lr=RATE)


def alone() -> Outcome:
    """Return the result of a plain loop."""
    return train_alone(net(), nn.functional.cross_entropy, adamw, [*batches(0, 1)] * EPOCHS)


def fit(mesh: str, directory: Path | None = None, start: Any = "new", **train: Any) -> tuple[list[Outcome], list[str]]:
    """Train; return the outcome of each rank, and what the first one has said."""
    config = {
        "parallel": {"mesh": mesh, "microbatches": 2},
        "train": {"epochs": EPOCHS, **train},
        "log": {"every": 1},
        "checkpoint": {"dir": None if directory is None else str(directory), "every": 3},
    }
    lines: list[str] = []
    losses: list[float] = []
    model = net()  # of a generator that threads have in common

    def note(figures: Any, *, step: int) -> None:
        losses.extend([figures["train/loss"]] if "train/loss" in figures else [])

    def run(transport: Any) -> Outcome:
        reporter = Reporter(None, lines.append if transport.rank == 0 else lambda line: None)
        told = {"optimizer": adamw, "transport": transport, "reporter": reporter, "sinks": [note]}
        blocks = split(copy.deepcopy(model))
        trainer = Trainer(blocks, batches, batches, config, **told)
        trainer.fit(start)
        return Outcome(losses, {blocks.own_names[name]: w for name, w in trainer.engine.full_weights().items()})

    return run_local(2, run), lines


@pytest.mark.parametrize("mesh", ["pp=2", "dp=2"])
def test_it_trains_as_a_loop_by_hand(mesh: str) -> None:
    found, lines = fit(mesh)
    require_equal(found, alone())
    assert lines[0].startswith("step 1/8  loss ")


def test_it_resumes_on_another_mesh(tmp_path: Path) -> None:
    fit("dp=2", tmp_path, max_steps=5)
    found, _ = fit("pp=2", tmp_path, "resume", max_steps=8)
    assert found[0].losses == pytest.approx(alone().losses[5:], abs=1e-12)


def test_a_data_set_is_divided_over_the_replicas_to_the_same_figures() -> None:
    def run(transport: Any) -> list[dict[str, Any]]:
        config = {"parallel": {"mesh": f"dp={transport.world_size}"}, "train": {"batch_size": 8, "accumulate": 2}}
        return Trainer(split(copy.deepcopy(model)), data(25), data(17), config, transport=transport).fit()

    model = net()  # 25 samples: the last batch has 1, which is not taken apart; of validation, 1
    (alone,), divided = run_local(1, run), run_local(4, run)
    for history in divided:
        for name in ("loss", "accuracy", "validation_loss", "validation_accuracy"):
            assert history[0][name] == pytest.approx(alone[0][name], abs=1e-12)


@pytest.mark.parametrize(
    ("config", "train", "words"),
    [
        ({"model": {"name": "gpt"}}, batches, "model is given as an object here"),
        ({"data": {"name": "text"}}, batches, "data is given as an object here"),
        ({"parallel": {"mesh": "dp=2"}}, DataLoader(data(), 4), "gives all 2 replicas the same samples"),
        ({"trian": {}}, batches, "did you mean 'train'"),
        ({"parallel": {"auto": {}}}, batches, "are for job files"),
        ({"train": {"loss": "a.py:f"}}, batches, "loss_fn is given, and train.loss of config too"),
        ({"train": {"optimizer": {"lr": 1.0}}}, batches, "optimizer is given, and train.optimizer of config too"),
        (3, batches, "config is 3; give a mapping with the sections of a job file"),
        ({"train": {"patience": 2}}, batches, r"train\.patience is set, but there are no data of validation"),
        ({"train": {"evaluate_every": 5}}, data(), r"train\.evaluate_every is set, but there are no data of"),
        ({}, {"train": {"epochs": 3}}, "a dict is no loader; give an object that yields batches"),
        ({}, None, "None is no loader"),
        ({}, [], "the loader of training, a list, has no batch"),
    ],
)
def test_what_is_missing_is_said(config: Any, train: Any, words: str) -> None:
    ranks = 2 if "mesh" in str(config) else 1
    own: dict[str, Any] = {"loss_fn": torch.nn.CrossEntropyLoss(), "optimizer": torch.optim.SGD}
    own = own if "is given, and" in words else {}
    with pytest.raises(qs.UsageError, match=words):
        run_local(ranks, lambda transport: Trainer(split(net()), train, None, config, transport=transport, **own))


def test_a_start_is_one_of_three_and_a_job_is_no_model() -> None:
    (trainer,) = run_local(1, lambda transport: Trainer(split(net()), batches, None, {}, transport=transport))
    with pytest.raises(qs.UsageError, match="fit: start is 'again'; there is: new, fresh, resume"):
        trainer.fit("again")  # type: ignore[arg-type]
    with pytest.raises(qs.UsageError, match=r"Trainer\.of_job"):
        Trainer(JobConfig(), None)  # type: ignore[arg-type]
