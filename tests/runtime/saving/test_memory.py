"""Rise of resident memory while a rank saves and loads, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "checkpoint_memory.py"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux alone tells the peak")
@pytest.mark.parametrize("format", ["native", "dcp"])
def test_saving_and_loading_keep_to_the_memory_that_the_documents_promise(tmp_path: Path, format: str) -> None:
    command = [sys.executable, str(BENCHMARK), "--dir", str(tmp_path), "--format", format]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
