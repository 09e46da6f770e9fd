"""Each family on each mesh is equal to one process, or refused before the first step; a few of them every day."""

import pytest

from .cells import MESHES, judge
from .every import FAMILIES, family_named

REFUSED = {("timm/beit", "tp2"), ("timm/eva", "tp2")}
"""Cells that tensor parallelism cannot cut yet: a bias that is assembled from parts in every forward."""

MAY_BE_REFUSED = {"sp", "cp2"}
"""Axes that may be refused: the number of tokens, an attention mask or a window may not allow slices."""


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_equal_or_refused(family: str) -> None:
    pytest.importorskip(family_named(family).library, reason="the extra `families` is not installed")
    for name, mesh in MESHES.items():
        if not mesh.takes(family_named(family)):
            continue
        verdict = judge(family_named(family), mesh)
        allowed = {"equal", "refused"} if name in MAY_BE_REFUSED or (family, name) in REFUSED else {"equal"}
        assert verdict.result in allowed, f"{name}: {verdict.result}, {verdict.why}"


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
