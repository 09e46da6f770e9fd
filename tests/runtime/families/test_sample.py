"""A few families on a few meshes train as in one process, each with something that others do not have."""

from __future__ import annotations

import pytest

from .cells import MESHES, judge
from .every import FAMILIES, family_named

SAMPLE = [
    ("transformers/gpt2", "pp4 1f1b"),
    ("transformers/phi", "dp2 ZeRO-1"),
    ("transformers/bert", "pp4 1f1b"),
    ("transformers/t5", "pp2 zb-h1"),
    ("transformers/gemma3_text", "tp2"),
    ("transformers/roberta", "sp"),
    ("timm/deit", "dp2 ZeRO-3"),
    ("timm/resnet", "bf16 dp2·pp2"),
]


@pytest.mark.parametrize(("family", "mesh"), SAMPLE, ids=lambda word: word.replace(" ", "_"))
def test_a_family_trains_as_in_one_process(family: str, mesh: str) -> None:
    pytest.importorskip(family_named(family).library, reason="the extra `families` is not installed")
    verdict = judge(family_named(family), MESHES[mesh])
    assert verdict.result == "equal", verdict.why


def test_the_matrix_is_as_wide_as_promised() -> None:
    libraries = [family.library for family in FAMILIES.values()]
    assert libraries.count("transformers") >= 30
    assert libraries.count("timm") >= 20
    assert len(FAMILIES) == len(libraries)
