"""1,000 steps: no growth of memory, file descriptors, threads, tensors or anything else that Python can see."""

import json
import sys
from pathlib import Path

import pytest

from ...helpers.commands import run
from .endurance import STEPS, WARM_UP, Footprint

SLACK_BYTES = 3_000_000
"""Memory that the allocator may keep: less than one activation of one microbatch per step."""
SLACK_OBJECTS = 100


def require_no_growth(before: Footprint, after: Footprint) -> None:
    assert after.files == before.files
    assert after.threads == before.threads
    assert after.tensors <= before.tensors + 5
    assert after.nodes <= before.nodes + 5
    assert after.objects <= before.objects + SLACK_OBJECTS < before.objects + STEPS - WARM_UP
    assert after.resident_bytes <= before.resident_bytes + SLACK_BYTES


@pytest.mark.slow
@pytest.mark.processes
def test_a_thousand_steps_over_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    code, _, err = run(sys.executable, *torchrun, "-m", "tests.runtime.train.endurance", tmp_path, "1f1b", "zb-h1")
    assert code == 0, err
    for rank in range(2):
        for before, after in json.loads((tmp_path / f"{rank}.json").read_text()).values():
            require_no_growth(Footprint(**before), Footprint(**after))
