"""Odd blocks give the numbers of one process on every mesh that cuts them, or are refused in the first step."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime.autograd.slice_kv_cache import Past
from quintsched.runtime.comm.choose_transport import connect_for
from quintsched.runtime.parallel.context.context_parallel import Context
from tests.compiling import torch_compiles

from ...ranks import run_ranks
from .odd_blocks import BLIND, COUNTING, ODD, PAIRED
from .training import Trained, refusal, require_equal, train, train_rank


@cache
def alone(name: str) -> Trained:
    return train("pp=1", [ODD[name]])[0]


def train_equal(name: str, mesh: str, *behind: type[nn.Module], **more: Any) -> list[Trained]:
    """Train a block on a mesh, and require equality with one process."""
    ranks = train(mesh, [ODD[name], *behind], **more)
    require_equal(ranks, alone(name))
    return ranks


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", ODD)
def test_over_tp(name: str) -> None:
    ranks = train_equal(name, "tp=2")
    assert ranks[0].has_pairs or name not in PAIRED


def in_turn(*meshes: tuple[str, dict[str, Any]]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return each block with one of the meshes."""
    return [(name, *meshes[number % len(meshes)]) for number, name in enumerate(ODD)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "more"), in_turn(("tp=4", {}), ("tp=2", {"sequence_parallel": True})))
def test_over_other_meshes(name: str, mesh: str, more: dict[str, Any]) -> None:
    train_equal(name, mesh, **more)


@pytest.mark.slow
@torch_compiles
def test_what_is_proved_may_be_compiled() -> None:
    train_equal("WideNorms", "tp=2", compiled=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_short_types_are_cut_alike(dtype: torch.dtype) -> None:
    blocks = [ODD[name] for name in ("PerHeadNorms", "SoftmaxBetween", "Mixture")]
    pairs = ", ".join(["0.q_proj", *(f"2.experts.{number}.fc1" for number in range(4))])
    whole = "whole: 2.gate; in no pair (a rule would cut them: rules={'*.gate': 'column'}): 2.gate"
    said = f"tp=2 cuts 22 of 45 weights; {whole}; pairs proved for all inputs: {pairs}; one by one: 1.fc1, 1.fc2"
    assert train("tp=2", blocks, dtype=dtype)[0].engine.tensor_cuts == said


PROCESSES = ("PerHeadNorms", "WideNorms", "SoftmaxBetween", "Turned")


def train_process(folder: str) -> None:
    """Train on one rank of two, and save its weights."""
    for name in PROCESSES:
        transport = connect_for(qs.compile("gpipe", mesh="tp=2", microbatches=2), 60, "gloo", None)
        weights = train_rank(transport, "tp=2", [ODD[name]]).weights
        torch.save(weights, Path(folder, f"{name}-{transport.rank}.pt"))


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_equal_one(tmp_path: Path) -> None:
    assert run_ranks(train_process, 2, str(tmp_path)) == [0, 0]
    for name in PROCESSES:
        weights = {name: weight for path in tmp_path.glob(f"{name}-*.pt") for name, weight in torch.load(path).items()}
        assert weights.keys() == alone(name).weights.keys()
        for weight, expected in alone(name).weights.items():
            torch.testing.assert_close(weights[weight], expected, rtol=1e-9, atol=1e-9)


class Anchor(nn.Module):
    """Takes what sequences that are cut need, so that nobody says that no block does."""

    def forward(self, x: Tensor, past: Past | None = None, context: Context | None = None) -> Tensor:
        return x


SLICED: dict[str, Any] = {"schedule": "seq-1f1b", "slices": 2}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "more"), in_turn(("cp=2", {}), ("cp=2,tp=2", {}), ("pp=2", SLICED)))
def test_where_sequences_are_cut(name: str, mesh: str, more: dict[str, Any]) -> None:
    if name in BLIND or (name in COUNTING and "slices" in more):
        assert "block 0 " in refusal(mesh, [ODD[name], Anchor], **more)
    else:
        train_equal(name, mesh, Anchor, **more)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("FusedExperts", "ep=2"),
        *(
            pytest.param(name, mesh, marks=pytest.mark.slow)
            for name, mesh in (("Mixture", "ep=2"), ("ChosenMixture", "ep=2,tp=2"), ("FusedExperts", "ep=2,tp=2"))
        ),
    ],
)
def test_experts_of_others_are_replicas_over_ep_and_named(
    name: str, mesh: str, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in train_equal(name, mesh, microbatches=1):
        assert str(rank.engine.expert_shares).startswith(
            "ep=2 shares out no experts; on all ranks alike, as over dp: 0.experts ("
        )
    assert "shares out no experts" in caplog.text
