"""Memory of ranks, term by term: published formulas and figures, what is in flight, and what ZeRO shares out."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quintsched as qs
from quintsched.schedules import find_schedule
from quintsched.simulation.simulated_activation_memory import peak_activations
from quintsched.strategies.descriptions.parameters import Held, total
from quintsched.strategies.descriptions.presets_and_files import find_hardware, find_model, model_names
from quintsched.strategies.prediction.layers_of_ranks import stages_of_rank
from quintsched.strategies.prediction.memory import activations
from quintsched.strategies.prediction.memory import in_flight_formulas as forms
from quintsched.strategies.prediction.memory.in_flight_formulas import in_flight
from quintsched.strategies.prediction.memory.vectorized_peak_memory import ENOUGH
from quintsched.strategies.prediction.memory.weights_grads_optimizer_bytes import state_bytes
from quintsched.strategies.prediction.strategy_columns import Table
from quintsched.strategies.prediction.vectorized_prediction import held

GPT3, A100 = find_model("gpt3-175b"), find_hardware("a100-80gb")


def terms_of(model: Any = GPT3, **asked: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return each term for every pipeline rank."""
    strategy = qs.Strategy(**{"gpus": 1, "batch": 64, "seq": 2048, **asked})
    terms, _ = held(model, A100, Table.from_strategies([strategy]), each_rank=True)
    return {name: bytes_[0] for name, bytes_ in terms.items()}


@pytest.mark.parametrize("name", model_names())
def test_one_rank_holds_all_weights(name: str) -> None:
    model = find_model(name)
    terms = terms_of(model, seq=model.seq)
    assert terms["weights"].tolist() == [2 * total(model)]
    assert terms["gradients"].tolist() == [4 * total(model)]
    assert terms["optimizer"].tolist() == [12 * total(model)]


@pytest.mark.parametrize("pp", [1, 2, 8, 12])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved-1f1b"])
def test_ranks_share_the_model_out_and_a_tied_head_is_a_copy(pp: int, schedule: str) -> None:
    chunks = 1 if schedule == "1f1b" else 2
    terms = terms_of(gpus=pp, pp=pp, schedule=schedule, chunks=chunks, batch=pp * 4)
    copies = GPT3.vocab * GPT3.hidden if pp * chunks > 1 else 0
    assert terms["weights"].sum() == 2 * (total(GPT3) + copies)


def test_activations_are_the_blocks_times_what_is_in_flight() -> None:
    terms = terms_of(gpus=32, pp=4, tp=8)
    kept = activations.block_kept(GPT3, activations.ActivationSizes(1, 2048, tp=8))
    for kind in ("attention", "scores", "ffn", "masks"):
        assert terms[f"activations_{kind}"].tolist() == [24 * flight * kept[kind] for flight in (4, 3, 2, 1)]
    assert terms["logits"].tolist() == [0, 0, 0, 2048 * 4 * 51200 / 8]
    assert terms["activations_embedding"].tolist() == [4 * 2048 * 12288, 0, 0, 0]


@pytest.mark.parametrize(("element", "parts"), [(2, (2, 4, 12)), (4, (4, 4, 8)), (8, (8, 8, 16))])
def test_formulas_of_zero(element: int, parts: tuple[int, int, int]) -> None:
    """Rajbhandari et al. 2020, arXiv:1910.02054, figure 1, with what is gathered; shards are rounded up."""
    weight, gradient, optimizer = parts
    held, unit, replicas = Held(1003, 0), Held(100, 0), 4
    found = state_bytes(held, unit, element, zero=np.arange(4), replicas=replicas, expert_replicas=replicas)
    shard = 251
    assert found["weights"].tolist() == [weight * n for n in (1003, 1003, 1003, shard)]
    assert found["gradients"].tolist() == [gradient * n for n in (1003, 1003, shard, shard)]
    assert found["optimizer"].tolist() == [optimizer * n for n in (1003, shard, shard, shard)]
    assert found["gathered"].tolist() == [0, 0, gradient * 100, gradient * 100 + weight * 200]


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


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("sp", [False, True])
def test_equations_of_the_paper(tp: int, sp: bool) -> None:
    """Korthikanti et al. 2022, equations 1 to 4 and 6, full recomputation, and section 4.3 for embedding and head."""
    model = qs.find_model("gpt3-175b")
    s, b, h, a, t = 2048, 2, model.hidden, model.heads, tp
    sizes = activations.ActivationSizes(b, s, tp=t, sequence_parallel=sp)
    expected = s * b * h * ((34 + 5 * a * s / h) / t if sp else 10 + 24 / t + 5 * a * s / (h * t))
    kept = activations.block_kept(model, sizes)
    assert sum(kept.values()) == pytest.approx(expected, rel=1e-12)
    assert kept["scores"] == pytest.approx(5 * a * s**2 * b / t, rel=1e-12)
    between = s * b * h / (t if sp else 1)
    assert activations.block_input(model, sizes) == 2 * between
    assert activations.embedding_kept(model, sizes) == between
    assert activations.head_kept(model, sizes) == {"tokens": 4 * between, "logits": 4 * s * b * model.vocab // t}


TRAINING = [one.name for one in qs.all_schedules() if one.built_in and one.mode == "train" and not one.searches]
BOUNDS = {"v-min", "v-half", "dualpipe-v", "zbv"}
"""Schedules that hold less than their form says if there are few microbatches."""


def _shapes(name: str) -> list[tuple[int, int, int]]:
    chunks = (1,) if find_schedule(name).max_chunks == 1 else (2,) if find_schedule(name).max_chunks == 2 else (2, 3, 4)
    return [(pp, count, v) for pp in (1, 2, 4, 6) for count in (1, 2, 4, 6, 12, 24) for v in chunks]


def compiled(name: str, pp: int, microbatches: int, chunks: int) -> qs.Plan | None:
    """Return a plan; None where the schedule does not take the shape."""
    try:
        return qs.compile(name, mesh=qs.Mesh(pp=pp), microbatches=microbatches, chunks=chunks)
    except qs.UsageError:
        return None


def _plans(name: str) -> Iterator[tuple[dict[str, int], qs.Plan]]:
    for pp, microbatches, chunks in _shapes(name):
        if plan := compiled(name, pp, microbatches, chunks):
            yield {"pp": pp, "microbatches": microbatches, "chunks": chunks}, plan


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TRAINING)
def test_in_flight_is_what_the_plan_holds(name: str) -> None:
    plans = list(_plans(name))
    assert len(plans) > 4
    for shape, plan in plans:
        pp = shape["pp"]
        held = np.array(peak_activations(plan, qs.Costs())) / (2 if find_schedule(name).bidirectional else 1)
        said = np.broadcast_to(forms.in_flight(name, **shape, rank=np.arange(pp)), pp)
        where = f"{name} {shape}: {held} {said}"
        if name in BOUNDS and shape["microbatches"] < 2 * pp:
            assert (held <= said + 1e-9).all(), where
        else:
            assert held == pytest.approx(said), where
        for first in range(pp):
            for last in range(first, pp):
                most = forms.in_flight(name, **shape, rank=first, last=last)
                assert most == pytest.approx(said[first : last + 1].max()), (where, first, last)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TRAINING)
def test_microbatches_of_the_first_stage_and_of_the_last(name: str) -> None:
    """Check the point at which their rank holds most, and of several such points the one with most of the stage."""
    scale, ways = 1e-6, 1 + find_schedule(name).bidirectional
    for shape, plan in _plans(name):
        few = {size: shape[size] for size in ("pp", "microbatches")}
        places = plan.stage_to_pp
        ends = {0: forms.first_in_flight(name, **shape), len(places) // ways - 1: forms.logits_in_flight(name, **few)}
        for stage, said in ends.items():
            activation = np.ones(len(places))
            alike = peak_activations(plan, qs.Costs(activation=activation.tolist()))[places[stage]]
            activation[stage] += scale
            heavier = peak_activations(plan, qs.Costs(activation=activation.tolist()))[places[stage]]
            held = round((heavier - alike) / scale, 3)
            where = f"{name} {shape} stage={stage}: {held} {said}"
            if name in BOUNDS or ways > 1 or (stage and shape["chunks"] > 1):
                assert held <= said or (stage and shape["microbatches"] < 2 * shape["pp"]), where
            else:
                assert held == said, where


@given(name=st.sampled_from(sorted({*TRAINING} - forms.KEEPS_LOGITS)), data=st.data())
@settings(max_examples=60, deadline=None)
def test_uneven_stages_hold_what_the_plan_holds(name: str, data: st.DataObject) -> None:
    pp = data.draw(st.integers(1, 6), "pp")
    _, microbatches, chunks = data.draw(st.sampled_from(_shapes(name)), "microbatches and chunks")
    plan = compiled(name, pp, microbatches, chunks)
    if plan is None:
        return
    twins = 1 + find_schedule(name).bidirectional
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=pp * chunks, max_size=pp * chunks), "sizes")
    held = peak_activations(plan, qs.Costs(activation=tuple(map(float, sizes * twins))))
    enough = min(microbatches, ENOUGH * pp + microbatches % pp)
    moments = forms.stages_in_flight(name, pp, enough, chunks)
    own = [[sizes[stage] for stage in stages_of_rank(rank, pp, chunks, name)] for rank in range(pp)]
    assert held == pytest.approx([(moments[rank] @ own[rank]).max() for rank in range(pp)])
