"""Odd blocks give the numbers of one process on every mesh that cuts them, or are refused in the first step."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quintsched.runtime.autograd.slice_kv_cache import Past
from quintsched.runtime.parallel.context.context_parallel import Context

from ....helpers.training import require_equal
from .odd_blocks import BLIND, COUNTING, ODD, PAIRED
from .training import BATCHES, Trained, refusal, train

SHARES: dict[str, Any] = {"sequence_parallel": True}
SLICES: dict[str, Any] = {"schedule": "seq-1f1b", "slices": 2}


@cache
def alone(name: str) -> Trained:
    return train("pp=1", [ODD[name]])[0]


def train_equal(name: str, mesh: str, *behind: type[nn.Module], **more: Any) -> list[Trained]:
    """Train a block on a mesh, and require equality with one process."""
    ranks = train(mesh, [ODD[name], *behind], **more)
    require_equal(ranks, alone(name), 1e-9)
    return ranks


def in_turn(*meshes: tuple[str, dict[str, Any]]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return each block with one of the meshes."""
    return [(name, *meshes[number % len(meshes)]) for number, name in enumerate(ODD)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "mesh", "more"), in_turn(("tp=2", {}), ("tp=4", {}), ("tp=2", SHARES)))
def test_over_tp(name: str, mesh: str, more: dict[str, Any]) -> None:
    ranks = train_equal(name, mesh, **more)
    assert ranks[0].has_pairs or name not in PAIRED or mesh == "tp=4"


def test_norms_of_the_whole_width_are_gathered_in_a_pair() -> None:
    assert all(rank.has_pairs for rank in train_equal("WideNorms", "tp=2"))


class FirstFeature(ODD["WideNorms"]):  # type: ignore[misc]
    """Multiplies one feature behind the norms, which one rank has; by 1, today."""

    def projected(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = self.q_norm(q), self.k_norm(k)
        factors = torch.ones_like(k)
        factors[..., :1] = 1.0
        return q, k * factors, v


def test_one_feature_treated_otherwise_behind_gathered_norms_is_no_pair() -> None:
    ranks = train("tp=2", [FirstFeature])
    require_equal(ranks, train("pp=1", [FirstFeature])[0])
    assert not ranks[0].has_pairs


class Anchor(nn.Module):
    """Takes what sequences that are cut need, so that nobody says that no block does."""

    def forward(self, x: Tensor, past: Past | None = None, context: Context | None = None) -> Tensor:
        return x


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "more"), in_turn(("cp=2", {}), ("cp=2,tp=2", {}), ("pp=2", SLICES)))
def test_where_sequences_are_cut(name: str, mesh: str, more: dict[str, Any]) -> None:
    if name in BLIND or (name in COUNTING and "slices" in more):
        assert "block 0 " in refusal(mesh, [ODD[name], Anchor], **more)
    else:
        train_equal(name, mesh, Anchor, **more)


def test_blocks_of_short_types_are_cut_alike() -> None:
    blocks = [ODD[name] for name in ("PerHeadNorms", "SoftmaxBetween")]
    said = "; pairs proved for all inputs: 0.q_proj; one by one: 1.fc1, 1.fc2"
    assert str(train("tp=2", blocks, BATCHES[:1], dtype=torch.bfloat16)[0].engine.tensor_cuts).endswith(said)


def test_experts_of_others_are_replicas_over_ep_and_named(caplog: pytest.LogCaptureFixture) -> None:
    for rank in train_equal("FusedExperts", "ep=2", microbatches=1):
        said = "ep=2 shares out no experts; on all ranks alike, as over dp: 0.experts ("
        assert str(rank.engine.expert_shares).startswith(said)
    assert "shares out no experts" in caplog.text
