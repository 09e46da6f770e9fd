"""The machine that these tests run on: ranks over NCCL on its GPUs, or, to try the tests themselves, over gloo.

pytest tests/gpu                     a GPU, NCCL; skipped, with a reason, where that cannot be had
pytest tests/gpu --device cpu        the same code over gloo: all but what asks a GPU something
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch

from benchmarks.gpu_parts.sharing import CannotShareError, environment, reason_to_skip
from benchmarks.gpu_parts.world import WorldFailedError, run_world
from quintsched.runtime.comm import LocalTransport, LocalWorld

Backend = Literal["nccl", "gloo"]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Machine:
    """Machine that ranks run on: "cuda" or "cpu"."""

    device: str

    @property
    def backend(self) -> Backend:
        """Backend of their messages."""
        return "nccl" if self.device == "cuda" else "gloo"

    def reason_to_skip(self, world_size: int) -> str:
        """Say why so many ranks cannot run here; empty if they can."""
        return reason_to_skip(world_size) if self.device == "cuda" else ""

    def environment(self, world_size: int) -> dict[str, str]:
        """Return what has to be in the environment of so many ranks."""
        try:
            return environment(world_size) if self.device == "cuda" else {}
        except CannotShareError as error:
            pytest.fail(str(error))

    def run(
        self, world_size: int, *worker: str | Path, timeout_s: float, variables: Mapping[str, str] | None = None
    ) -> None:
        """Run `-m worker…` on so many ranks; they have to end well."""
        told = {**self.environment(world_size), "PYTHONPATH": _path(), **(variables or {})}
        try:
            run_world(world_size, ["-m", *map(str, worker)], timeout_s=timeout_s, variables=told)
        except WorldFailedError as error:
            pytest.fail(str(error))

    def alone(self) -> LocalTransport:
        """Return the transport of one rank without any message."""
        return LocalTransport(LocalWorld(1, device=self.device), 0)

    def synchronize(self) -> None:
        """Wait until everything that was asked of the device is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def require_cuda(self, why: str) -> None:
        """Skip the rest of a test that only a GPU can answer."""
        if self.device != "cuda":
            pytest.skip(f"{why}: asked of a GPU only")


def _path() -> str:
    """Return where ranks find the tests as modules."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
