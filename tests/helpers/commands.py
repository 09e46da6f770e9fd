"""Commands in processes of their own, and the files of a job for them."""

import contextlib
import os
import signal
import subprocess
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


def write_job(folder: Path, job: str, model: str, **names: object) -> Path:
    """Write a job file, in which names in braces are replaced, with its model and its data; return its path."""
    (folder / "data.py").write_text(DATA)
    (folder / "model.py").write_text(model)
    (folder / "job.yaml").write_text(job.format(folder=folder, **names))
    return folder / "job.yaml"
