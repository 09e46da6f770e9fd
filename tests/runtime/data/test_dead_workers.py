"""A DataLoader's worker that ends without an error, as `sys.exit` in a dataset makes it end, is named."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from quintsched.errors import CodeError
from quintsched.runtime.data.torch_loader_position import naming_workers

pytestmark = pytest.mark.processes


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


def test_a_worker_that_exits_is_named() -> None:
    """By torch, where it looks for its workers first, else by us."""
    by_us = r"DataLoader worker \(pid \d+, exit code 0\) ended before its batch was there"
    with pytest.raises((CodeError, RuntimeError), match=rf"{by_us}|DataLoader worker \(pid\(s\) \d+\) exited"):
        fetch_all(Ends(SystemExit(0)))


def test_a_dataset_s_own_error_stays_as_it_is() -> None:
    with pytest.raises(ConnectionResetError, match="my own"):
        fetch_all(Ends(ConnectionResetError("my own")))
