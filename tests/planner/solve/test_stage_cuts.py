"""Cuts of layers into stages: the best of all, as brute force finds it, timed as `simulate` times their plans."""

from __future__ import annotations

import itertools
import random
import re

import numpy as np
import pytest

from quintsched.errors import UsageError
from quintsched.ir.instruction_set import Bwd, BwdInput, BwdWeight, Compute, Fwd
from quintsched.schedules import find_schedule
from quintsched.simulation.costs import Costs
from quintsched.solve import LayerCosts, cut_stages
from quintsched.solve.stage_cuts import cut_search
from quintsched.solve.stage_cuts.layer_costs import Layers
from quintsched.solve.stage_cuts.layout_strings import megatron_layout, read_megatron_layout, stage_letters

SCHEDULES = {1: ("1f1b", "gpipe", "zb-h1", "zb-h2"), 2: ("interleaved-1f1b", "zbv", "bfs")}


def drawn(seed: int) -> tuple[LayerCosts, int, int, int]:
    """Return a small instance: costs of unlike layers, pp, chunks and microbatches."""
    rng = random.Random(seed)
    pp, chunks = rng.choice(((2, 1), (3, 1), (4, 1), (2, 2)))
    each = lambda kind, most: {  # noqa: E731
        "kind": kind,
        **{
            name: rng.uniform(0.1, most)
            for name in ("forward", "backward_input", "backward_weight", "activation", "state")
        },
    }
    decoders = [each("decoder", 2.0) for _ in range(rng.randint(2, 5))]
    mtp = [each("mtp", 2.0)] * rng.choice((0, 0, 2))
    layers = [each("embedding", 0.5), *decoders, *mtp, each("loss", 4.0)]
    costs = LayerCosts.model_validate({"layers": layers, "p2p": rng.choice((0.0, 0.3))})
    return costs, pp, chunks, pp * rng.randint(1, 2)


def step_time(order: list[list[Compute]], ranks: tuple[int, ...], times: list[dict[type, float]], p2p: float) -> float:
    """Return the longest span of a rank, by running the computations one after the other."""
    free, begun, done = [0.0] * len(order), [-1.0] * len(order), dict[tuple[bool, int, int], float]()
    wires, places = dict[tuple[int, int], float](), [0] * len(order)
    while any(place < len(own) for place, own in zip(places, order, strict=True)):
        for rank, own in enumerate(order):
            while places[rank] < len(own):
                one = own[places[rank]]
                stage, last = one.stage, one.stage == len(ranks) - 1
                if isinstance(one, Fwd):
                    source, is_forward = stage - 1, True
                elif isinstance(one, BwdWeight):
                    source, is_forward = stage, False
                else:
                    source, is_forward = (stage, True) if last else (stage + 1, False)
                arrival = 0.0
                if source >= 0:
                    key = (is_forward, source, one.microbatch)
                    if key not in done:
                        break
                    arrival = done[key]
                    if ranks[source] != rank:
                        wire = (ranks[source], rank)
                        arrival = wires[wire] = max(arrival, wires.get(wire, 0.0)) + p2p
                start = max(free[rank], arrival)
                begun[rank] = start if begun[rank] < 0 else begun[rank]
                free[rank] = start + times[stage][type(one)]
                if not isinstance(one, BwdWeight):
                    done[isinstance(one, Fwd), stage, one.microbatch] = free[rank]
                places[rank] += 1
    return max(end - start for end, start in zip(free, begun, strict=True))


def all_cuts(layers: Layers, stages: int, pp: int) -> list[list[int]]:
    """Return all cuts that the module allows, as numbers of layers before each stage."""
    found = []
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    text = "".join(letters[kind] for kind in layers.kinds)
    for inner in itertools.combinations_with_replacement(range(1, len(text)), stages - 1):
        ends = [0, *inner, len(text)]
        parts = [text[first:end] for first, end in itertools.pairwise(ends)]
        together = [stage for stage, part in enumerate(parts) if "m" in part]
        if "E" in parts[0] and "L" in parts[-1] and len(together) <= 1 and all(s >= stages - pp for s in together):
            found.append(ends)
    return found


def times_of(costs: LayerCosts, ends: list[int]) -> list[dict[type, float]]:
    """Return the times of each stage's computations."""
    every = [layer for layer in costs.layers for _ in range(layer.count)]
    found = []
    for first, end in itertools.pairwise(ends):
        part = every[first:end]
        forward, halves = (
            sum(one.forward for one in part),
            [sum(one.amount(n) for one in part) for n in ("backward_input", "backward_weight")],
        )
        found.append({Fwd: forward, BwdInput: halves[0], BwdWeight: halves[1], Bwd: sum(halves)})
    return found


@pytest.mark.parametrize("block", range(4))
def test_no_cut_and_no_schedule_is_faster(block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        costs, pp, chunks, microbatches = drawn(seed)
        names = random.Random(seed).sample(SCHEDULES[chunks], 2)
        found = cut_stages(costs, pp=pp, microbatches=microbatches, chunks=chunks, schedules=names)
        best = min(
            step_time(orders, shape.stage_to_pp, times_of(costs, ends), costs.p2p)
            for schedule in map(find_schedule, names)
            for shape in [schedule.shape(pp, microbatches, chunks)]
            for orders in [[list(schedule.order(rank, shape)) for rank in range(pp)]]
            for ends in all_cuts(Layers.of(costs), pp * chunks, pp)
        )
        assert found.best.value == pytest.approx(best, rel=1e-9), seed
        assert found.best.is_exact
        assert found.best.value <= found.even.value


def test_moves_find_the_best_of_all_cuts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [drawn(seed) for seed in range(200, 225)]
    exact = [cut_stages(costs, pp=pp, microbatches=m, chunks=chunks).best.value for costs, pp, chunks, m in cases]
    monkeypatch.setattr(cut_search, "ENUMERATED", 0)
    monkeypatch.setattr(cut_search, "WORK", 500_000)
    moved = [cut_stages(costs, pp=pp, microbatches=m, chunks=chunks, effort=1).best for costs, pp, chunks, m in cases]
    assert not any(best.is_exact for best in moved)
    assert [best.value for best in moved] == pytest.approx(exact)


DEEPSEEK = LayerCosts.model_validate(
    {
        "layers": [
            {"kind": "embedding", "forward": 0.1, "activation": 0.1, "state": 1},
            {"count": 3, "forward": 0.8, "activation": 1, "state": 1},
            {"count": 58, "forward": 1.0, "activation": 1, "state": 2},
            {"kind": "mtp", "forward": 1.2, "activation": 1, "state": 2},
            {"kind": "loss", "forward": 2.0, "activation": 0.5, "state": 1},
        ],
        "p2p": 0.05,
    }
)


@pytest.mark.parametrize(
    ("schedule", "pp", "chunks", "cap"),
    [("1f1b", 4, 1, 90), ("interleaved-1f1b", 4, 2, 115), ("zbv", 4, 2, 96.5), ("solve", 2, 1, 125)],
)
def test_a_cut_is_timed_as_its_plan_is_simulated(schedule: str, pp: int, chunks: int, cap: float) -> None:
    sizes = {"pp": pp, "microbatches": 2 * pp, "chunks": chunks}
    found = cut_stages(DEEPSEEK, **sizes, schedules=[schedule], effort=1, memory_cap=cap)  # type: ignore[arg-type]
    plan, best = found.plan(), found.best
    simulated = plan.simulate(Costs.model_validate({"p2p": 0.05, **best.costs}))
    assert plan.blocks_per_stage == best.stages
    assert sum(best.stages) == 64
    assert simulated.span == pytest.approx(best.value)
    state = [
        sum(one for one, rank in zip(best.of_stages("state"), plan.stage_to_pp, strict=True) if rank == r)
        for r in range(pp)
    ]
    assert best.peaks == pytest.approx(
        [held + own for held, own in zip(simulated.peak_activations, state, strict=True)]
    )
    assert max(best.peaks) <= cap


def test_a_searched_order_with_its_cut_is_as_fast_as_all_named_ones() -> None:
    every = cut_stages(DEEPSEEK, pp=3, microbatches=6, schedules=["auto"], effort=1, memory_cap=120)
    named = [
        cut_stages(DEEPSEEK, pp=3, microbatches=6, schedules=[name], effort=1, memory_cap=120).best.value
        for name in ("1f1b", "zb-h1")
    ]
    assert every.best.value <= min(named)
    assert every.gain > 0.1


def test_layouts_of_others_are_written_and_read() -> None:
    layers = Layers.of(DEEPSEEK)
    for text, stages in (
        ("Et*3|(tt|)*29,m|L", ["Ettt", *["tt"] * 29, "m", "L"]),
        ("Et*4|(t*4|)*14,tmL", ["Etttt", *["tttt"] * 14, "tmL"]),
        ("Et|t*60||mL", ["Et", "t" * 60, "", "mL"]),
    ):
        cut = read_megatron_layout(text, layers)
        assert stage_letters(layers, cut) == stages
        assert megatron_layout(layers, cut) == text
    rng = random.Random(0)
    for _ in range(100):
        cut = np.array([0, *sorted(rng.choices(range(1, layers.num_pieces), k=11)), layers.num_pieces])
        assert read_megatron_layout(megatron_layout(layers, cut), layers).tolist() == cut.tolist()
    found = cut_stages(DEEPSEEK, pp=16, chunks=2, microbatches=16, layouts=["Et*3|(tt|)*29,m|L"], effort=1)
    assert found.best.value <= found.others[0].value <= found.even.value
    names = found.best.torchtitan
    assert names[0][:2] == ["tok_embeddings", "layers.0"]
    assert names[-1][-2:] == ["norm", "output"]
    assert [name for stage in names for name in stage][1:-3] == [f"layers.{layer}" for layer in range(61)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Et*61|x|mL", "'x' is none of"),
        ("Et*60|mL", "the costs have Et*61mL"),
        ("E|(t|)*999999mL", "over 65536 characters"),
        ("Et*61|mL", "2 stages, not 4"),
    ],
)
def test_layouts_of_other_layers_are_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        cut_stages(DEEPSEEK, pp=4, microbatches=8, layouts=[text])


def test_too_little_time_is_refused_and_is_no_fault_of_the_memory() -> None:
    with pytest.raises(UsageError, match="allow for more seconds"):
        cut_stages(DEEPSEEK, pp=3, microbatches=6, schedules=["solve"], seconds=1e-9)


def test_wrong_costs_and_caps_are_refused() -> None:
    with pytest.raises(UsageError, match="no cut keeps to the memory cap of 20 GB; even stages need 9"):
        cut_stages(DEEPSEEK, pp=4, microbatches=8, memory_cap=20)
    with pytest.raises(UsageError, match="interleaved-1f1b"):
        cut_stages(DEEPSEEK, pp=4, microbatches=6, chunks=2)
    with pytest.raises(UsageError, match="one direction"):
        cut_stages(DEEPSEEK, pp=4, microbatches=8, schedules=["dualpipe"])
    decoder = {"forward": 1.0}
    for layers in ([decoder] * 3, [{"kind": "embedding", **decoder}, {"kind": "loss", **decoder}, decoder]):
        with pytest.raises(ValueError, match="give one embedding, decoders"):
            LayerCosts.model_validate({"layers": layers})
