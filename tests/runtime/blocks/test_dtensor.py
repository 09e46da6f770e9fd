"""Modules that PyTorch has sharded train as stages to the numbers of one process: one launch of gloo processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import quintsched as qs

from ...helpers.commands import run
from ..toys import Outcome, tiny_gpt, train_plainly, worst_difference
from .dtensor_worker import CASES, CLIP, TASK, shard_fully

pytestmark = pytest.mark.processes

RANKS = 4


@pytest.mark.slow
def test_they_train_to_the_numbers_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    worker = ("-m", "tests.runtime.blocks.dtensor_worker", str(tmp_path))
    code, _, err = run(sys.executable, *torchrun, *worker, timeout_s=100)
    assert code == 0, err
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    alone = train_plainly(TASK, tiny_gpt(depth=3), 4, clip=CLIP, dtype=torch.float64)
    for name, case in CASES.items():
        if case.refusal:
            assert all(case.refusal in rank[name]["refusal"] for rank in ranks), name
            continue
        held = [rank[name].pop("held") for rank in ranks]
        outcomes = [Outcome(**rank[name]) for rank in ranks]
        assert worst_difference(outcomes, alone) <= (1e-10 if case.dtype == torch.float64 else 2e-2), name
        sizes = qs.Mesh.parse(case.mesh)
        replicas = sizes.axis_size("dp") * sizes.axis_size("ep")
        shares = replicas if case.shard is shard_fully else sizes.axis_size("tp")
        master = torch.float64 if case.dtype == torch.float64 else torch.float32
        kept = {found["model.1.mlp.fc1.weight"] for found in held if "model.1.mlp.fc1.weight" in found}
        assert kept == {((64 // shares, 16), master)}, name
