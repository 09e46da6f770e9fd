"""Cuts of layers into stages: the best of all, as brute force finds it, timed as `simulate` times their plans."""

import itertools
import random
import re
from functools import partial

import numpy as np
import pytest

import quintsched as qs
from quintsched.errors import UsageError
from quintsched.simulation.costs import Costs
from quintsched.solve import LayerCosts, cut_stages
from quintsched.solve.stage_cuts import cut_search
from quintsched.solve.stage_cuts.layer_costs import Layers
from quintsched.solve.stage_cuts.layout_strings import megatron_layout, read_megatron_layout, stage_letters
from tests.helpers.refusals import require_refusals
from tests.layers import ROOT

SCHEDULES = {1: ("1f1b", "gpipe", "zb-h1", "zb-h2"), 2: ("interleaved-1f1b", "zbv", "bfs")}


def drawn(seed: int) -> tuple[LayerCosts, int, int, int]:
    """Return a small instance: costs of unlike layers, pp, chunks and microbatches."""
    rng = random.Random(seed)
    pp, chunks = rng.choice(((2, 1), (3, 1), (4, 1), (2, 2)))
    names = ("forward", "backward_input", "backward_weight", "activation", "state")
    each = lambda kind, most: {"kind": kind, **{name: rng.uniform(0.1, most) for name in names}}  # noqa: E731
    decoders = [each("decoder", 2.0) for _ in range(rng.randint(2, 5))]
    mtp = [each("mtp", 2.0)] * rng.choice((0, 0, 2))
    layers = [each("embedding", 0.5), *decoders, *mtp, each("loss", 4.0)]
    costs = LayerCosts.model_validate({"layers": layers, "p2p": rng.choice((0.0, 0.3))})
    return costs, pp, chunks, pp * rng.randint(1, 2)


def step_time(plan: qs.Plan, costs: LayerCosts, ends: list[int]) -> float:
    """Return the longest span of a rank of a plan whose stages are cut so."""
    every = [layer for layer in costs.layers for _ in range(layer.count)]
    stages = [every[first:end] for first, end in itertools.pairwise(ends)]
    times = {
        name: tuple(sum(one.amount(name) for one in part) for part in stages)
        for name in ("forward", "backward_input", "backward_weight")
    }
    return plan.simulate(Costs(**times, p2p=costs.p2p)).span


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


@pytest.mark.parametrize("block", [*range(2), *(pytest.param(k, marks=pytest.mark.slow) for k in range(2, 17))])
def test_no_cut_and_no_schedule_is_faster(block: int) -> None:
    for seed in range(12 * block, 12 * block + 12):
        costs, pp, chunks, microbatches = drawn(seed)
        names = random.Random(seed).sample(SCHEDULES[chunks], 2)
        found = cut_stages(costs, pp=pp, microbatches=microbatches, chunks=chunks, schedules=names)
        plans = [qs.compile(name, mesh=qs.Mesh(pp=pp), microbatches=microbatches, chunks=chunks) for name in names]
        cuts = all_cuts(Layers.of(costs), pp * chunks, pp)
        best = min(step_time(plan, costs, ends) for plan in plans for ends in cuts)
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


@pytest.mark.slow
def test_moves_find_the_only_cut_that_keeps_to_a_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cap under which each single move fills the fullest rank more, or as much."""
    costs, pp, chunks, microbatches = drawn(1013)
    sizes = {"pp": pp, "microbatches": microbatches, "chunks": chunks, "schedules": ["zbv"], "memory_cap": 6.2}
    exact = cut_stages(costs, **sizes)  # type: ignore[arg-type]
    monkeypatch.setattr(cut_search, "ENUMERATED", 0)
    moved = cut_stages(costs, **sizes)  # type: ignore[arg-type]
    assert (exact.best.is_exact, moved.best.is_exact) == (True, False)
    assert max(moved.best.peaks) <= 6.2
    with pytest.raises(UsageError, match="no cut was found that keeps to the memory cap of 1 GB"):
        cut_stages(costs, **sizes | {"memory_cap": 1})  # type: ignore[arg-type]


PIECES = [
    {"kind": "embedding", "forward": 0.1, "activation": 0.1, "state": 1},
    {"count": 3, "forward": 0.8, "activation": 1, "state": 1},
    {"count": 58, "forward": 1.0, "activation": 1, "state": 2},
    {"kind": "mtp", "forward": 1.2, "activation": 1, "state": 2},
    {"kind": "loss", "forward": 2.0, "activation": 0.5, "state": 1},
]
DEEPSEEK = LayerCosts.model_validate({"layers": PIECES, "p2p": 0.05})


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


@pytest.mark.parametrize(("chunks", "cap"), [(1, 25), pytest.param(2, 24, marks=pytest.mark.slow)])
def test_an_order_is_searched_where_no_named_one_has_room(chunks: int, cap: float) -> None:
    """Cap for one microbatch at a time, or a little more."""
    costs = LayerCosts.load(ROOT / "examples" / "layers.json")
    sizes = {"pp": 4, "microbatches": 4, "chunks": chunks, "memory_cap": cap, "effort": 1, "seconds": 20}
    with pytest.raises(UsageError, match="no cut keeps to the memory cap"):
        cut_stages(costs, **sizes | {"chunks": 1})  # type: ignore[arg-type]
    found = cut_stages(costs, **sizes, schedules=["solve"])  # type: ignore[arg-type]
    assert found.best.schedule == "solve"
    assert max(found.best.peaks) <= cap
    simulated = found.plan().simulate(Costs.model_validate({"p2p": costs.p2p, **found.best.costs}))
    assert simulated.span == pytest.approx(found.best.value)


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


def test_wrong_costs_and_caps_and_too_little_time_are_refused() -> None:
    cut = partial(cut_stages, DEEPSEEK, pp=4, microbatches=8)
    require_refusals(
        ("allow for more seconds", lambda: cut(schedules=["solve"], seconds=1e-9)),
        ("no cut keeps to the memory cap of 20 GB; even stages need 9", lambda: cut(memory_cap=20)),
        ("interleaved-1f1b", lambda: cut(microbatches=6, chunks=2)),
        ("one direction", lambda: cut(schedules=["dualpipe"])),
    )
    decoder = {"forward": 1.0}
    for layers in ([decoder] * 3, [{"kind": "embedding", **decoder}, {"kind": "loss", **decoder}, decoder]):
        with pytest.raises(ValueError, match="give one embedding, decoders"):
            LayerCosts.model_validate({"layers": layers})
