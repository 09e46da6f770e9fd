"""Loaders of users: their batches, runs that go on exactly where they were, and workers that end without an error."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from quintsched.errors import CodeError, MisfitError, UsageError
from quintsched.runtime.data import PackedStream
from quintsched.runtime.data.torch_loader_position import naming_workers
from quintsched.runtime.data.user_loaders import OTHER_DATA, LoaderFeed
from quintsched.runtime.settings.job_file import JobConfig

from ...helpers.jobs import fit

FILE = """
from functools import partial

import torch
from torch import nn
from quintsched.runtime.data import Loaders

def build(data):
    return [partial(nn.Linear, 6, 12), nn.Tanh, partial(nn.Linear, 12, 12), partial(nn.Linear, 12, 5)]

random = torch.Generator().manual_seed(2)
INPUTS, TARGETS = torch.randn(40, 6, generator=random), torch.randint(5, (40,), generator=random)
ROWS = [(x, y) for x, y in zip(INPUTS, TARGETS)]

class Shuffled:
    '''Draws an order per epoch from a generator of its own, and says where it is.'''

    def __init__(self, replica, num_replicas, endless=False):
        self.generator = torch.Generator().manual_seed(7 + replica)
        self.rows = torch.arange(40)[replica::num_replicas]
        self.order, self.at, self.endless = None, 0, endless

    def __len__(self):
        return len(self.rows) // 4

    def __iter__(self):
        while True:
            if self.order is None:
                self.order, self.at = self.rows[torch.randperm(len(self.rows), generator=self.generator)], 0
            while self.at + 4 <= len(self.order):
                some = self.order[self.at : self.at + 4]
                self.at += 4
                yield INPUTS[some], TARGETS[some]
            self.order = None
            if not self.endless:
                return

    def state_dict(self):
        return {"order": self.order, "at": self.at, "random": self.generator.get_state()}

    def load_state_dict(self, state):
        self.order, self.at = state["order"], state["at"]
        self.generator.set_state(state["random"])

def endless(replica, num_replicas):
    return Loaders(Shuffled(replica, num_replicas, True), validation=[(INPUTS[:4], TARGETS[:4])], batches=7)

class Whole(Shuffled):
    '''All replicas draw the same order, and take their shares of each batch.'''

    def __init__(self, replica, num_replicas):
        super().__init__(0, 1)
        self.share = slice(replica, None, num_replicas)

    def __iter__(self):
        return ((inputs[self.share], targets[self.share]) for inputs, targets in super().__iter__())

def whole(replica, num_replicas):
    return Whole(replica, num_replicas)

class Counted(torch.utils.data.Dataset):
    '''Of the second replica, samples depend on how many were read.'''

    def __init__(self, replica):
        self.replica, self.calls = replica, 0

    def __len__(self):
        return 20

    def __getitem__(self, index):
        self.calls += self.replica
        return INPUTS[index] + self.calls / 100, TARGETS[index]

def counted(replica):
    return torch.utils.data.DataLoader(Counted(replica), batch_size=4)

def shared(replica, num_replicas):
    from torch.utils.data import DataLoader, default_collate
    random = torch.Generator().manual_seed(7)
    share = lambda rows: default_collate(rows[replica::num_replicas])
    return DataLoader(ROWS, batch_size=8, shuffle=True, generator=random, collate_fn=share)

def four(replica):
    return [(INPUTS[replica : replica + 4], TARGETS[replica : replica + 4])] * 5

def uneven(replica):
    return [(INPUTS[:4], TARGETS[:4])] * (5 - replica)
"""


def job(tmp_path: Path, load: str, mesh: str = "dp=2,pp=2", **checkpoint: Any) -> JobConfig:
    (tmp_path / "mine.py").write_text(FILE)
    return JobConfig.model_validate(
        {
            "model": {"name": f"{tmp_path / 'mine.py'}:build"},
            "data": {"name": f"{tmp_path / 'mine.py'}:{load}"},
            "parallel": {"mesh": mesh, "microbatches": 2},
            "train": {"epochs": 3, "batch_size": 8, "optimizer": {"name": "adam", "lr": 1e-2}},
            "checkpoint": {"dir": str(tmp_path / "out"), "every": 3, "keep": 99, **checkpoint},
        }
    )


def forget_after(tmp_path: Path, step: int) -> None:
    for folder in (tmp_path / "out").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)


GOES_ON: dict[str, tuple[str, str, str, int, dict[str, Any]]] = {
    "where endless loaders were, in DCP": ("endless", "dp=2,pp=2", "", 9, {"format": "dcp"}),
    "with loaders of other replicas": ("whole", "dp=2", "pp=2", 9, {}),
    "behind any batch of a list, in DCP": ("four", "dp=2", "", 6, {"format": "dcp"}),
    "for other replicas, with loaders without a state": ("shared", "dp=2", "dp=1", 9, {}),
}
"""Loader, mesh, another mesh if any, step, and settings of the checkpoints of a run that goes on."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", GOES_ON)
def test_a_run_goes_on(kind: str, tmp_path: Path) -> None:
    load, first, second, step, more = GOES_ON[kind]
    expected = weights_of(job(tmp_path, load, mesh=first, **more))
    forget_after(tmp_path, step)
    assert (tmp_path / "out" / f"step-{step:08d}" / "manifest.json").exists()
    found = weights_of(job(tmp_path, load, mesh=second or first, **more), resume=True)
    near = {"rtol": 1e-4, "atol": 1e-5} if second else {"rtol": 0, "atol": 0}
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], **near)


def weights_of(job: JobConfig, **more: Any) -> dict[str, Tensor]:
    return {name: weight for _, weights, _ in fit(job, **more) for name, weight in weights.items()}


def test_other_data_of_another_rank_are_said(tmp_path: Path) -> None:
    settings = job(tmp_path, "counted", mesh="dp=2", every=1)
    fit(settings)
    forget_after(tmp_path, 3)
    assert fit(settings, resume=True)[0][2].count(OTHER_DATA) == 1


def test_as_many_samples_make_a_step_as_before(tmp_path: Path) -> None:
    fit(job(tmp_path, "four", mesh="dp=2"))
    forget_after(tmp_path, 3)
    one = job(tmp_path, "four", mesh="dp=1")
    words = (
        r"written by a run with 8 samples in a step, but here loaders give 4, 4 of 1 replica\(s\); let each give "
        r"8 // num_replicas, or say --override data.samples_per_step"
    )
    with pytest.raises(MisfitError, match=words):
        fit(one, resume=True)
    fit(one, resume=True, overrides=["data.samples_per_step"])
    fit(job(tmp_path, "four", mesh="pp=2,dp=2"), resume=True, overrides=["data"])


def test_loaders_of_unlike_lengths_are_refused(tmp_path: Path) -> None:
    words = "the lengths of their loaders: batches of training is 5 on ranks 0 and 1, but 4 on ranks 2 and 3"
    with pytest.raises(MisfitError, match=words):
        fit(job(tmp_path, "uneven"))


def test_a_length_has_to_be_true() -> None:
    class Says(list[Any]):
        def __len__(self) -> int:
            return 3

    with pytest.raises(MisfitError, match="ended after 2 batches; its length says 3"):
        list(LoaderFeed(Says([(1, 2)] * 2), None).epoch(0))
    with pytest.raises(MisfitError, match="more batches than the 3"):
        list(LoaderFeed(Says([(1, 2)] * 4), None).epoch(0))
    endless = (batch for batch in [(1, 2)])
    of_stream = DataLoader(PackedStream(["abc"], sequence=1, batch_size=1), batch_size=None)
    for loader in (endless, of_stream):
        with pytest.raises(UsageError, match=r"has no length; say how many batches .* Loaders\(loader, batches=1000\)"):
            LoaderFeed(loader, None)
    words = r"validation, a generator, has no length; .* validation=list\(itertools\.islice\("
    with pytest.raises(UsageError, match=words):
        LoaderFeed(endless, None, saves=False)


class Ends(Dataset[Tensor]):
    """Two samples, then an error."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> Tensor:
        if number > 1:
            raise self.error
        return torch.ones(3)


def fetch_all(data: Dataset[Tensor]) -> None:
    batches: Any = iter(DataLoader(data, batch_size=2, num_workers=1))
    try:
        while True:
            with naming_workers():
                next(batches)
    finally:
        batches._shutdown_workers()


@pytest.mark.processes
def test_a_worker_that_exits_is_named() -> None:
    """By torch, where it looks for its workers first, else by us."""
    by_us = r"DataLoader worker \(pid \d+, exit code 0\) ended before its batch was there"
    with pytest.raises((CodeError, RuntimeError), match=rf"{by_us}|DataLoader worker \(pid\(s\) \d+\) exited"):
        fetch_all(Ends(SystemExit(0)))


@pytest.mark.processes
def test_a_dataset_s_own_error_stays_as_it_is() -> None:
    with pytest.raises(ConnectionResetError, match="my own"):
        fetch_all(Ends(ConnectionResetError("my own")))
