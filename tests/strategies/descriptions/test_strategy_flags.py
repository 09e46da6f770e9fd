"""Strategies: rows of flags are read, invalid ones get one clear error, and what frameworks accept is accepted."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import quintsched as qs
from quintsched.import_user_code import load_schedule
from quintsched.strategies.descriptions.flag_rows import INNERMOST_FIRST, read_row
from quintsched.strategies.descriptions.strategy_validity import check

FEW_KEYS = {"like": "llama-2-70b", "kv_heads": 4, "heads": 24, "head_size": 128, "ffn": 24576}

NONSENSE: list[tuple[str, dict[str, Any], str]] = [
    ("gpt3-175b", {"gpus": 7}, "gpus=7, but the mesh one rank has 1"),
    ("gpt3-175b", {"gpus": 16, "dp": 4, "tp": 2}, "the mesh dp=4 x tp=2 has 8"),
    ("gpt3-175b", {"gpus": 5, "tp": 5}, "tp=5 does not divide the 96 heads"),
    ({"like": "llama-2-7b", "ffn": 11009}, {"gpus": 2, "tp": 2}, "tp=2 does not divide the 11009 features"),
    (FEW_KEYS, {"gpus": 6, "tp": 6}, "kv_heads"),
    ("gpt3-175b", {"gpus": 8, "dp": 8, "batch": 4}, "batch=4 does not divide over dp·ep=8 replicas"),
    ("gpt3-175b", {"gpus": 8, "dp": 8, "batch": 24, "microbatch": 2}, "microbatches of 2; the nearest .* is 16"),
    ("gpt3-175b", {"gpus": 128, "pp": 128, "batch": 128}, "128 stages, more than the 96 layers"),
    ("gpt3-175b", {"gpus": 8, "pp": 8, "chunks": 13, "batch": 8}, "pp=8 x chunks=13 are 104 stages"),
    ("gpt3-175b", {"gpus": 2, "ep": 2}, "ep=2, but gpt3-175b has no experts"),
    ("mixtral-8x7b", {"gpus": 3, "ep": 3, "batch": 3}, "ep=3 does not divide the 8 experts"),
    ("gpt3-175b", {"gpus": 3, "cp": 3}, "cp=3 does not divide the 2048 tokens"),
    ("gpt3-175b", {"gpus": 8, "tp": 8, "seq": 2044, "sequence_parallel": True}, "does not divide the 2044 tokens"),
    ("vit-b-16", {"gpus": 1, "seq": 196}, "cuts an image into 197 tokens"),
    ("gpt3-175b", {"gpus": 4, "pp": 4, "recompute": 25}, "no stage has more than 24 layers"),
    ("gpt3-175b", {"gpus": 2, "pp": 2, "recompute": (1, 2, 3)}, "numbers for 3 stages, but 1f1b has 2"),
    ("gpt3-175b", {"gpus": 2, "pp": 2, "recompute": (1, 49)}, "recompute=49 of stage 1, which has 48 layers"),
    ("gpt3-175b", {"gpus": 2, "pp": 2, "recompute": (-1, 4)}, "recompute=-1 of stage 0"),
    ("gpt3-175b", {"gpus": 2, "pp": 2, "stages": (48, 49)}, "have 97 layers together, but gpt3-175b has 96"),
    ("gpt3-175b", {"gpus": 2, "pp": 2, "stages": (96,)}, "are 1, but pp x chunks makes 2"),
    ("gpt3-175b", {"gpus": 2, "pp": 2, "stages": (97, -1)}, "a stage has -1 layers"),
    ("gpt3-175b", {"gpus": 1, "schedule": "1f2b"}, "unknown schedule '1f2b'; did you mean"),
    ("gpt3-175b", {"gpus": 1, "schedule": "inference"}, "does not train"),
    ("gpt3-175b", {"gpus": 2, "pp": 2, "schedule": "zb-auto"}, "an order that it searches under costs"),
    ("gpt3-175b", {"gpus": 2, "pp": 2, "schedule": "zbv", "chunks": 3}, "zbv: chunks is 3; this schedule takes ex"),
    ("gpt3-175b", {"gpus": 4, "pp": 4, "chunks": 2, "batch": 6}, "interleaved-1f1b: "),
]


@pytest.mark.parametrize(("model", "asked", "fault"), NONSENSE)
def test_nonsense_gets_one_clear_error(model: Any, asked: dict[str, Any], fault: str) -> None:
    found = qs.find_model(model)
    with pytest.raises(qs.UsageError, match=fault):
        check(found, None, qs.Strategy(**{"batch": 8, "seq": found.seq, **asked}))


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        ("gpt3-175b", {"gpus": 16, "tp": 16}),  # across nodes
        ("llama-2-70b", {"gpus": 64, "tp": 64, "batch": 64}),
        ("llama-2-7b", {"gpus": 32, "tp": 32}),
        ("gpt2", {"gpus": 4, "tp": 4}),  # the vocabulary is padded
        ("gpt3-175b", {"gpus": 5, "pp": 5, "batch": 5}),  # 96 layers on 5 ranks
        ("gpt3-175b", {"gpus": 1, "sequence_parallel": True, "zero": 3}),  # nothing to share out
        ("gpt3-175b", {"gpus": 2, "pp": 2, "stages": (96, 0)}),
        ("gpt3-175b", {"gpus": 2, "pp": 2, "recompute": (0, 48)}),
        ("gpt3-175b", {"gpus": 1, "chunks": 4}),  # one stage, however it is cut
        ("gpt3-175b", {"gpus": 4, "pp": 4, "schedule": "zbv"}),
        ("mpt-7b", {"gpus": 1, "seq": 65536}),  # learned positions grow
        ("vit-b-16", {"gpus": 1, "seq": 197}),
        ("mixtral-8x7b", {"gpus": 8, "ep": 4, "tp": 2}),
    ],
)
def test_what_can_be_placed_is(model: str, asked: dict[str, Any]) -> None:
    found = qs.find_model(model)
    check(found, qs.find_hardware("a100"), qs.Strategy(**{"batch": 8, "seq": found.seq, **asked}))


def test_hardware_without_a_figure_for_the_precision() -> None:
    strategy = qs.Strategy(gpus=1, batch=1, seq=2048, dtype="fp64")
    hardware = qs.find_hardware({"like": "a100", "name": "mine", "tflops": {"bf16": 300}})
    with pytest.raises(qs.UsageError, match="hardware mine has no figure for dtype fp64"):
        check(qs.find_model("gpt3-175b"), hardware, strategy)


def test_routes_of_a_schedule_of_ones_own_are_not_predicted() -> None:
    chimera = load_schedule(str(Path(__file__).parents[3] / "examples" / "chimera.py") + ":chimera").name
    with pytest.raises(qs.UsageError, match="has routes of its own"):
        check(qs.find_model("gpt3-175b"), None, qs.Strategy(gpus=4, pp=4, batch=8, seq=2048, schedule=chimera))


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
