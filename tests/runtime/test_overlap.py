"""Forwards and backwards that overlap: the numbers are those of one process, and bit for bit those without overlap."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from quintsched.ir.instruction_set import Overlap

from .mesh_matrix import Case, Differences, train_alone, train_on

STEPS = 4
"""Two in which the sides are noted, two in which they run side by side."""

CASES = [
    Case("dualpipe-v", "ep=2", "gpt", False, microbatches=4),
    Case("dualpipe-v", "tp=2", "tied qwen", True, microbatches=4),
    Case("dualpipe-v", "cp=2", "switch", False, microbatches=4),
    Case("dualpipe-v", "pp=2,ep=2", "llama", False, microbatches=4),
    Case("dualpipe-v", "pp=2,tp=2", "gpt", False, microbatches=4),
    Case("dualpipe-v", "pp=2,tp=2", "llama", True, microbatches=4),
    Case("dualpipe-v", "pp=2,cp=2", "tied", False, microbatches=4),
    Case("dualpipe-v", "pp=2,cp=2,tp=2", "tied qwen", True, microbatches=4),
    Case("dualpipe-v", "dp=2,pp=2,ep=2", "tied", False, microbatches=4, zero=1),
    Case("dualpipe-v", "dp=2,pp=2,tp=2", "switch", True, microbatches=4, zero=3),
    Case("dualpipe-v", "ep=2,tp=2,pp=2", "llama", True, microbatches=4),
    Case("dualpipe-v", "ep=2,cp=2,pp=2", "switch", False, microbatches=4, zero=2),
    Case("dualpipe", "pp=2,ep=2", "gpt", False, microbatches=4),
    Case("dualpipe", "pp=2,tp=2", "llama", True, microbatches=4),
    Case("dualpipe", "pp=2,cp=2", "switch", False, microbatches=4),
    Case("interleaved-1f1b", "pp=2,ep=2", "llama", False, microbatches=4),
    Case("interleaved-1f1b", "pp=2,tp=2", "tied", True, microbatches=4),
    Case("interleaved-1f1b", "pp=2,cp=2", "tied qwen", False, microbatches=4),
    Case("interleaved-1f1b", "dp=2,ep=2,pp=2", "gpt", False, microbatches=4, zero=2),
    Case("interleaved-1f1b", "cp=2,ep=2,pp=2,tp=2", "switch", True, microbatches=4),
]


QUICK = {0, 1, 2, 12, 15}
"""Cases of every day; the others are for the long proof."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if number in QUICK else pytest.mark.slow) for number, case in enumerate(CASES)],
    ids=str,
)
def test_overlap_changes_no_number(case: Case) -> None:
    overlapped = replace(case, overlap=True)
    assert len(overlapped.plan.columns.rows_where(Overlap))
    found, plain = train_on(overlapped, STEPS, torch.float64), train_on(case, STEPS, torch.float64)
    for one, other in zip(found, plain, strict=True):
        assert one.losses == other.losses
        assert one.norms == other.norms
        for name, weight in one.weights.items():
            assert torch.equal(weight, other.weights[name]), name
            assert torch.equal(one.gradients[name], other.gradients[name]), name
    differences = asdict(Differences.of(found, train_alone(*case.alone, STEPS, torch.float64)))
    if case.zero in (1, 2):
        del differences["gradients"]  # of which each rank has a shard
    assert all(value <= 1e-12 for value in differences.values()), differences
