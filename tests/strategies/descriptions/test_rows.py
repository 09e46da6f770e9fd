"""Rows of flags: what they leave out is found from the rest, and what is wrong is said."""

from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import quintsched as qs
from quintsched.strategies.descriptions.flag_rows import INNERMOST_FIRST, read_row

GPT = {"layers": 8, "hidden": 64, "heads": 8, "vocab": 512, "seq": 128}
GPU = {"tflops": {"bf16": 100}, "memory_gb": 16, "memory_gbps": 1000, "link_gbps": 100, "network_gbps": 10}


def row(**values: Any) -> dict[str, Any]:
    return {"model": GPT, "hardware": GPU, "batch": 64, **values}


@given(
    sizes=st.dictionaries(st.sampled_from(INNERMOST_FIRST), st.sampled_from([1, 2, 4, 8])),
    spare=st.integers(1, 4),
    has_gpus=st.booleans(),
)
def test_what_is_missing_is_found_from_the_rest(sizes: dict[str, int], spare: int, has_gpus: bool) -> None:
    product = prod(sizes.values())
    gpus = product * (spare if "dp" not in sizes else 1)
    found = read_row(row(**sizes, **({"gpus": gpus} if has_gpus else {}))).strategy
    assert {axis: getattr(found, axis) for axis in sizes} == sizes
    assert found.dp * found.tp * found.pp * found.cp * found.ep == found.gpus
    assert found.gpus == (gpus if has_gpus else product)
    assert all(getattr(found, axis) == 1 for axis in INNERMOST_FIRST if axis != "dp" and axis not in sizes)


@pytest.mark.parametrize(
    ("given", "read"),
    [("full", "full"), ("selective", "selective"), (2, 2), ("2", 2), ("1,0", (1, 0)), ([1, 0], (1, 0))],
)
def test_how_much_is_recomputed(given: object, read: object) -> None:
    assert read_row(row(pp=2, recompute=given)).strategy.recompute == read


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tpp": 8}, "unknown key 'tpp'; did you mean 'tp'"),
        ({"model": None}, "model is missing"),
        ({"tp": 0}, "tp is 0; give a whole number from 1"),
        ({"tp": True}, "tp is True; give a whole number"),
        ({"gpus": 10**30}, "gpus is 1000"),
        ({"gpus": 8, "tp": 3}, "gpus=8 cannot be shared out: tp=3 does not divide it"),
        ({"gpus": 8, "tp": 2, "dp": 3}, "gpus=8, but tp=2 x dp=3 = 6"),
        ({"gpus_per_node": 0}, "gpus_per_node is 0"),
        ({"recompute": "some"}, "recompute is 'some'; give none, selective, full"),
        ({"recompute": -1}, "recompute is -1; give"),
        ({"stages": "3,x"}, "stages is '3,x'; give"),
        ({"zero": 4}, "zero is 4: input should be 0, 1, 2 or 3"),
        ({"dtype": "int8"}, "dtype is 'int8': input should be"),
        ({"sequence_parallel": "yes please"}, "sequence_parallel is 'yes please'"),
    ],
)
def test_what_is_wrong_is_said(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(qs.UsageError, match=words):
        read_row(row(**wrong))
