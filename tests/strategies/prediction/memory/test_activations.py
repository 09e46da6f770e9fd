"""Bytes of activations: the published formulas and figures, and the parts that they leave out."""

import pytest

import quintsched as qs
from quintsched.strategies.prediction.memory import activations
from quintsched.strategies.prediction.memory.in_flight import in_flight

GIB = 2**30
MODELS = {
    "22B": ("megatron-22b", 4, 1, 1),
    "175B": ("gpt3-175b", 1, 8, 3),
    "530B": ("mt-nlg-530b", 1, 35, 3),
    "1T": ("gpt-1t", 1, 64, 1),
}
"""Name, microbatch, pp, chunks; tp is 8 (Korthikanti et al. 2022, arXiv:2205.05198, table 3)."""

FIGURE_1 = {
    "22B": (45.5625, 59.25, 9.5625),
    "175B": (45.5625, 66.84375, 12.3515625),
    "530B": (31.640625, 114.0234375, 23.076171875),
    "1T": (32.958984375, 131.25, 26.5625),
}
"""GiB of parameters and optimizer, of activations without recomputation, and with selective recomputation and sequence
parallelism, on the first rank (as digitised in calculon-ai/calculon, calculon/llm/validation.py)."""

FIGURE_7 = {
    "22B": {"sp": 66.84, "sel": 49.42, "sp_sel": 16.18, "full": 7.64},
    "175B": {"sp": 62.04, "sel": 56.53, "sp_sel": 18.49, "full": 8.71},
    "530B": {"sp": 58.31, "sel": 62.04, "sp_sel": 20.27, "full": 9.42},
    "1T": {"sp": 58.31, "sel": 62.04, "sp_sel": 20.27, "full": 9.42},
}
"""Percent of what tensor parallelism alone keeps (from the same source)."""


def _layer(model: qs.Model, microbatch: int, *, sp: bool, selective: bool) -> float:
    kept = activations.block_kept(model, activations.ActivationSizes(microbatch, model.seq, tp=8, sequence_parallel=sp))
    return float(sum(bytes_ for kind, bytes_ in kept.items() if not (selective and kind == "scores")))


@pytest.mark.parametrize("name", MODELS)
def test_figure_1(name: str) -> None:
    preset, microbatch, pp, chunks = MODELS[name]
    model = qs.find_model(preset)
    flight = in_flight("interleaved-1f1b" if chunks > 1 else "1f1b", pp=pp, microbatches=512, chunks=chunks, rank=0)
    layers = flight * model.layers / pp
    none = layers * _layer(model, microbatch, sp=False, selective=False)
    selective = layers * _layer(model, microbatch, sp=True, selective=True)
    state = 18 * 12 * model.hidden**2 * model.layers / (8 * pp)  # matrices alone, as in the paper
    assert [state / GIB, none / GIB, selective / GIB] == pytest.approx(FIGURE_1[name], rel=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_figure_7(name: str) -> None:
    preset, microbatch, *_ = MODELS[name]
    model = qs.find_model(preset)
    whole = _layer(model, microbatch, sp=False, selective=False)
    found = {
        "sp": _layer(model, microbatch, sp=True, selective=False),
        "sel": _layer(model, microbatch, sp=False, selective=True),
        "sp_sel": _layer(model, microbatch, sp=True, selective=True),
        "full": float(activations.block_input(model, activations.ActivationSizes(microbatch, model.seq, tp=8))),
    }
    percent = {mode: 100 * bytes_ / whole for mode, bytes_ in found.items()}
    assert percent == pytest.approx(FIGURE_7[name], abs=0.15)


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("sp", [False, True])
def test_equations_of_the_paper(tp: int, sp: bool) -> None:
    """Korthikanti et al. 2022, equations 1 to 4, and section 4.3 for embedding and head."""
    model = qs.find_model("gpt3-175b")
    s, b, h, a, t = 2048, 2, model.hidden, model.heads, tp
    sizes = activations.ActivationSizes(b, s, tp=t, sequence_parallel=sp)
    expected = s * b * h * ((34 + 5 * a * s / h) / t if sp else 10 + 24 / t + 5 * a * s / (h * t))
    assert sum(activations.block_kept(model, sizes).values()) == pytest.approx(expected, rel=1e-12)
    between = s * b * h / (t if sp else 1)
    assert activations.embedding_kept(model, sizes) == between
    assert activations.head_kept(model, sizes) == {"tokens": 4 * between, "logits": 4 * s * b * model.vocab // t}
