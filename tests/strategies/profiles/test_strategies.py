"""Strategies predicted from a profile of operators: even stages, more GPUs, and what such a profile cannot place."""

from pathlib import Path

import pytest

import quintsched as qs
from quintsched.strategies.prediction.profiled.predict_from_profile import predict_from_profile
from quintsched.strategies.profiles.aceso import read_folder
from quintsched.strategies.profiles.profile import Profile

FOLDER = Path(__file__).parents[2] / "data" / "aceso"
MODEL = qs.Model(name="gpt-1.3b", layers=24, hidden=2048, heads=32, vocab=51200, attention="unfused")
HARDWARE = qs.find_hardware("l4")


@pytest.fixture(scope="module")
def profile() -> Profile:
    return read_folder(FOLDER)


def strategy(**changes: object) -> qs.Strategy:
    sizes = {"gpus": 2, "pp": 2, "batch": 32, "seq": 2048, "dtype": "fp16", "recompute": "selective"}
    return qs.Strategy.model_validate(sizes | changes)


def test_an_even_pipeline_is_near_a_measured_uneven_one(profile):
    """Two stages of 159 and 156 operators and other recomputation took 14.25 s."""
    found = predict_from_profile(MODEL, HARDWARE, strategy(), profile)
    assert found.step_s == pytest.approx(14.25, rel=0.1)
    assert sum(found.breakdown_s.values()) == pytest.approx(found.step_s)
    assert sum(found.breakdown_bytes.values()) == pytest.approx(found.memory_bytes)
    assert len(found.memory_bytes_per_rank) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus": 4, "cp": 2}, "no cp"),
        ({"zero": 1}, "no zero"),
        ({"schedule": "zb-h1"}, "not zb-h1"),
        ({"chunks": 2}, "no chunks"),
        ({"sequence_parallel": True}, "sequence parallelism"),
        ({"gpus": 4}, "gpus=4, but the mesh pp=2 has 2"),
        ({"batch": 33, "microbatch": 2}, "batch=33 does not divide"),
        ({"stages": (12, 13)}, "gpt-1.3b has 24"),
    ],
)
def test_what_operators_cannot_place_is_said(profile, changes, said):
    with pytest.raises((qs.MisfitError, qs.UsageError), match=said):
        predict_from_profile(MODEL, HARDWARE, strategy(**changes), profile)


def test_selective_recomputation_needs_attention(profile):
    blocks = tuple(one.model_copy(update={"kind": "block"}) for one in profile.operators)
    blind = profile.model_copy(update={"operators": blocks})
    with pytest.raises(qs.UsageError, match="which operators are attention"):
        predict_from_profile(MODEL, HARDWARE, strategy(), blind)
