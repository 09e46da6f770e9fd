"""Commands in processes of their own, and the files of a job for them."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

DATA = """
import numpy as np
from quintsched.runtime.data import Dataset, Split

def load(train=75, validation=20):
    random = np.random.default_rng(0)
    def split(n):
        targets = random.integers(0, 4, n)
        inputs = random.normal(size=(n, 1, 8, 8)).astype(np.float32) + targets[:, None, None, None]
        return Split(inputs=inputs, targets=targets)
    return Dataset(name="steps", train=split(train), validation=split(validation), num_classes=4)
"""
"""Data file of images."""


def run(*command: str | Path, timeout_s: float = 150) -> tuple[int, str, str]:
    """Run a command in a process group of its own, which ends with the test whatever happens."""
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, out, err


def until(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait until something holds, which it has to before the time is over."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
