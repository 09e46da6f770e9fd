"""Predicted steps: breakdowns add up, more work takes longer, and compiled plans take as long in the simulator."""

from dataclasses import dataclass, field
from math import prod

import pytest

import quintsched as qs
from quintsched.instructions import Bwd, Fwd
from quintsched.simulation.simulated_activation_memory import peak_activations
from quintsched.strategies.descriptions.hardware import Curve, MeasuredRates
from quintsched.strategies.prediction.simulated_strategy import costs_of, simulated_step_s
from quintsched.strategies.prediction.strategy_columns import Table
from quintsched.strategies.prediction.strategy_plans import plan_of
from quintsched.strategies.prediction.vectorized_prediction import evaluate
from tests.helpers.refusals import require_refusals

TOLERANCE = 0.01
LARGE, SMALL, MIXED = (qs.find_model(name) for name in ("gpt3-175b", "mpt-1b", "mixtral-8x7b"))
A100 = qs.find_hardware("a100-80gb")

SCHEDULES = [
    one.name
    for one in qs.all_schedules()
    if one.built_in and one.mode == "train" and one.max_slices == 1 and not one.searches
]


def strategy(**sizes):
    """Return a strategy whose GPUs are those of its mesh."""
    return qs.Strategy(gpus=prod(sizes.get(axis, 1) for axis in ("dp", "tp", "pp", "cp", "ep")), seq=2048, **sizes)


def error_of(model, hardware, given):
    """Return the relative error of a prediction against the simulation of its plan."""
    return qs.predict(model, hardware, given).step_s / simulated_step_s(model, hardware, given) - 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {"dp": 16, "tp": 8, "pp": 8, "batch": 1536, "chunks": 3, "recompute": "selective", "sequence_parallel": True},
        {"tp": 8, "pp": 8, "batch": 64, "chunks": 3, "recompute": "full"},
        {"tp": 8, "pp": 8, "batch": 8, "recompute": "full"},
        {"tp": 8, "pp": 16, "batch": 32, "recompute": 3},
        {"dp": 4, "tp": 8, "pp": 10, "batch": 64, "zero": 1},
        {"dp": 4, "tp": 8, "pp": 10, "batch": 160, "zero": 1, "chunks": 3},
        {"dp": 4, "tp": 4, "pp": 16, "batch": 512, "zero": 2, "chunks": 2},
        {"dp": 4, "tp": 4, "pp": 16, "batch": 512, "zero": 2, "zero_every": 128},
        {"dp": 32, "tp": 8, "batch": 128, "zero": 1},
        {"dp": 64, "tp": 8, "batch": 512, "zero": 3, "recompute": "full"},
        {"dp": 2, "tp": 8, "pp": 7, "batch": 56, "schedule": "zb-h1"},
        {"tp": 8, "pp": 4, "batch": 32, "recompute": (9, 6, 3, 0)},
        {"tp": 8, "pp": 48, "batch": 3072},
    ],
    ids=str,
)
def test_predictions_are_what_plans_take(sizes, overlap):
    assert abs(error_of(LARGE, A100, strategy(**sizes, overlap=overlap))) < TOLERANCE


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_under_each_schedule(schedule):
    given = strategy(dp=2, pp=4, batch=64, schedule=schedule, overlap=True)
    found, quick = (qs.predict(SMALL, A100, given).step_s, evaluate(SMALL, A100, Table.from_strategies([given])))
    assert abs(error_of(SMALL, A100, given)) < TOLERANCE
    assert quick.step_s[0] == pytest.approx(found) if quick.exact[0] else quick.step_s[0] <= found * (1 + 1e-9)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (SMALL, {"dp": 8, "tp": 2, "pp": 4, "batch": 64, "chunks": 2, "zero": 3}),
        (SMALL, {"dp": 8, "pp": 4, "batch": 32, "schedule": "dualpipe-v", "chunks": 2, "zero": 3}),
        (SMALL, {"dp": 8, "pp": 4, "batch": 64, "schedule": "chimera"}),
        (SMALL, {"dp": 64, "pp": 4, "batch": 512, "schedule": "dualpipe", "zero": 1}),
        (SMALL, {"dp": 8, "pp": 2, "batch": 64, "schedule": "dualpipe", "stages": (11, 13), "recompute": 1}),
        (LARGE, {"dp": 8, "tp": 4, "pp": 2, "batch": 16, "schedule": "interleaved-1f1b", "chunks": 2}),
        (SMALL, {"dp": 16, "pp": 2, "batch": 32, "schedule": "interleaved-1f1b", "chunks": 2, "zero": 1}),
        (LARGE, {"dp": 8, "tp": 8, "pp": 4, "batch": 1024, "schedule": "bfs", "chunks": 3}),
        (MIXED, {"dp": 8, "ep": 2, "pp": 4, "batch": 16, "schedule": "bfs", "chunks": 2}),
        (MIXED, {"dp": 8, "pp": 4, "batch": 64, "schedule": "interleaved-zb", "chunks": 2}),
        (LARGE, {"tp": 8, "pp": 8, "batch": 256, "schedule": "eager-1f1b", "stages": (13, *(12,) * 6, 11)}),
        (LARGE, {"dp": 8, "tp": 8, "batch": 8, "schedule": "interleaved-1f1b", "chunks": 3, "recompute": "full"}),
        (MIXED, {"dp": 8, "tp": 8, "batch": 16, "schedule": "interleaved-1f1b", "chunks": 2, "recompute": "full"}),
    ],
    ids=lambda one: one.name if isinstance(one, qs.Model) else str(one),
)
def test_where_replicas_take_most_of_the_time(model, sizes):
    slow, given = A100.model_copy(update={"network_gbps": 5.0}), strategy(**sizes)
    assert abs(error_of(model, slow, given)) < TOLERANCE
    bound = evaluate(model, slow, Table.from_strategies([given])).step_s[0]
    assert bound <= qs.predict(model, slow, given).step_s * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "gpipe", "dualpipe", "hanayo"])
def test_a_cap_of_activations_holds_and_its_copies_are_waited_for(schedule):
    given = strategy(tp=8, pp=8, batch=32, schedule=schedule)
    capped = given.model_copy(update={"offload": 4.0})
    plain, found = qs.predict(LARGE, A100, given), qs.predict(LARGE, A100, capped)
    assert found.step_s == pytest.approx(simulated_step_s(LARGE, A100, capped), rel=TOLERANCE)
    assert found.step_s == pytest.approx(plain.step_s + found.breakdown_s["offload"])
    assert qs.predict(LARGE, A100.model_copy(update={"pcie_gbps": 4.0}), capped).step_s > 2 * found.step_s
    kept = [term for term in found.breakdown_bytes if term.startswith(("activations", "logits"))]
    peak = max(peak_activations(plan_of(LARGE, capped), costs_of(LARGE, A100, capped)))
    assert sum(found.breakdown_bytes[term] for term in kept) == pytest.approx(peak, rel=0.03)
    assert found.memory_bytes < plain.memory_bytes


def test_a_cap_that_saves_nothing_or_cannot_be_kept_is_refused():
    given = strategy(tp=8, pp=8, batch=32)
    rate = Curve(sizes=(1.0,), rates=(1e9,))
    measured = MeasuredRates(matmul={"bf16": rate}, memory=rate, link=rate, kernel_s=0, cores=2)
    cpu = A100.model_copy(update={"measured": measured})

    def predicted(hardware, **more):
        return qs.predict(LARGE, hardware, given.model_copy(update=more))

    require_refusals(
        ("the least that works", lambda: predicted(A100, offload=0.5)),
        ("keep nothing to offload", lambda: predicted(A100, offload=2.0, recompute="full")),
        ("own memory", lambda: predicted(cpu, offload=2.0)),
    )


def step(name="gpt3-175b", **given):
    settings = {"gpus": 64, "tp": 8, "pp": 8, "batch": 64, "seq": 2048} | given
    return qs.predict(qs.find_model(name), A100, qs.Strategy(**settings))


ZERO_2 = {"dp": 2, "gpus": 128, "batch": 128, "zero": 2}

STRATEGIES = [
    ("gpt3-175b", {}),
    ("gpt3-175b", {"recompute": "selective", "sequence_parallel": True, "chunks": 3}),
    ("gpt3-175b", {"recompute": 3, "gpus": 128, "dp": 2, "zero": 1}),
    ("gpt3-175b", {"schedule": "zbv", "gpus": 128, "dp": 2, "zero": 2, "overlap": True}),
    ("llama-3-70b", {"cp": 4, "gpus": 256, "seq": 8192}),
    ("mixtral-8x7b", {"ep": 8, "tp": 1, "gpus": 64, "seq": 4096}),
    ("deepseek-v3", {"ep": 64, "tp": 1, "pp": 16, "gpus": 1024, "batch": 1024, "seq": 4096}),
    ("mpt-7b", {"tp": 1, "pp": 1, "dp": 64, "zero": 3, "recompute": "full"}),
    ("vit-h-14", {"tp": 1, "pp": 1, "dp": 64, "seq": 257}),
]


@pytest.mark.parametrize(("name", "given"), STRATEGIES)
def test_breakdowns_add_up(name, given):
    found = step(name, **given)
    exposed = {term: value for term, value in found.breakdown_s.items() if not term.endswith("_hidden")}
    assert sum(exposed.values()) == pytest.approx(found.step_s)
    assert all(value >= 0 for value in found.breakdown_s.values())
    assert sum(found.breakdown_bytes.values()) == pytest.approx(found.memory_bytes)
    assert 0 < found.mfu < 0.8
    assert found.tokens_per_s * found.step_s == pytest.approx(found.strategy.batch * found.strategy.seq)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"batch": 128}),
        ({"recompute": "none"}, {"recompute": "selective"}),
        ({"recompute": "selective"}, {"recompute": "full"}),
        ({"recompute": 1}, {"recompute": 2}),
        ({"chunks": 3}, {"chunks": 1}),
        ({"seq": 1024}, {"seq": 2048}),
        ({"dp": 1}, {"dp": 2, "gpus": 128, "batch": 128}),
        ({"gpus": 128, "dp": 2, "chunks": 3}, {"gpus": 128, "dp": 2, "chunks": 3, "overlap": False}),
        ({"dp": 8, "pp": 1, "zero": 1}, {"dp": 8, "pp": 1, "zero": 1, "overlap": False}),
        ({"dp": 8, "pp": 1, "overlap": False, "gradients": "bf16"}, {"dp": 8, "pp": 1, "overlap": False}),
        ({"fused_accumulation": True}, {}),
        (ZERO_2 | {"zero_every": 8}, ZERO_2),
        ({"schedule": "zb-h1"}, {"schedule": "1f1b"}),
        ({"dtype": "bf16"}, {"dtype": "fp32"}),
    ],
)
def test_more_work_takes_longer(one, other):
    assert step(**one).step_s < step(**other).step_s


def padded_step(padded_to):
    mixtral = qs.find_model("mixtral-8x7b")
    experts = mixtral.experts.model_copy(update={"padded_to": padded_to})
    strategy = qs.Strategy(gpus=64, pp=8, ep=8, batch=64, seq=4096)
    return qs.predict(mixtral.model_copy(update={"experts": experts}), A100, strategy)


def test_what_fills_up_experts_takes_time_and_memory_and_is_no_work_of_the_model():
    routed, even, more, all_rows, too_many = map(padded_step, (None, 1.0, 1.25, 4.0, 9.0))
    assert routed.step_s == even.step_s < more.step_s < all_rows.step_s
    assert routed.memory_bytes == even.memory_bytes < more.memory_bytes < all_rows.memory_bytes
    assert too_many.step_s == all_rows.step_s, "an expert is given no token twice"
    assert more.mfu * more.step_s == pytest.approx(routed.mfu * routed.step_s)


def test_a_window_saves_attention_of_all_layers_but_every_kth():
    sizes = {"gpus": 64, "tp": 8, "pp": 8, "batch": 64, "seq": 32768}
    whole = qs.find_model("llama-3-70b")
    every, half, none = (
        qs.predict(whole.model_copy(update=more), A100, qs.Strategy(**sizes)).breakdown_s["compute"]
        for more in ({"window": 1024}, {"window": 1024, "window_except": 2}, {})
    )
    assert every < half < none
    assert half - every == pytest.approx(none - half, rel=0.1)


def test_a_token_goes_to_a_node_once_where_its_experts_are_on_few():
    deepseek = qs.find_model("deepseek-v3")
    anywhere = deepseek.model_copy(update={"experts": deepseek.experts.model_copy(update={"nodes": None})})
    strategy = qs.Strategy(gpus=64, ep=64, batch=64, seq=4096)
    few, each = (qs.predict(model, A100, strategy).breakdown_s["ep"] for model in (deepseek, anywhere))
    assert few == pytest.approx(each / 2, rel=1e-2)  # 4 nodes, 8 experts


def test_eight_bits_and_modules_that_are_recomputed():
    h800, deepseek = qs.find_hardware("h800"), qs.find_model("deepseek-v3")
    sizes = {"gpus": 1024, "pp": 16, "ep": 64, "batch": 4096, "seq": 4096, "zero": 1}
    wide, short, again = (
        qs.predict(deepseek, h800, qs.Strategy(**sizes, **more))
        for more in ({}, {"dtype": "fp8"}, {"dtype": "fp8", "recompute": "layernorm+mla_up_proj+moe_act+mlp_act"})
    )
    assert short.step_s < again.step_s < wide.step_s
    assert again.memory_bytes < short.memory_bytes < wide.memory_bytes


def test_blocks_of_32_numbers_are_rounded_both_ways_at_once():
    b200, sizes = qs.find_hardware("b200"), {"gpus": 64, "dp": 8, "tp": 8, "batch": 64, "seq": 8192, "zero": 1}
    fp8, mxfp8, wide = (
        qs.predict(qs.find_model("llama-3-8b"), b200, qs.Strategy(**sizes, dtype=dtype))
        for dtype in ("fp8", "mxfp8", "bf16")
    )
    assert fp8.memory_bytes < mxfp8.memory_bytes < wide.memory_bytes
    assert mxfp8.breakdown_s["compute"] < fp8.breakdown_s["compute"] < wide.breakdown_s["compute"], "one pass, not two"


MODEL = qs.Model(layers=8, hidden=64, heads=4, vocab=64, seq=32, tied=False, dropout=False)
AT_ONCE = Curve(sizes=(1.0, 2.0), rates=(1e18, 1e18))
RATE = Curve(sizes=(1.0, 2.0), rates=(1e9, 1e9))


def hardware(cores: int) -> qs.Hardware:
    """Return ranks that only compute: messages, sums and passes over memory take no time."""
    rates: dict[str, object] = {name: {"fp32": RATE} for name in ("matmul", "attention", "attention_backward")}
    rates |= dict.fromkeys(("memory", "optimizer", "link", "link_work"), AT_ONCE)
    rates |= dict.fromkeys(("all_reduce", "all_reduce_work"), dict.fromkeys((2, 4, 8), AT_ONCE))
    measured = MeasuredRates(**rates, kernel_s=0.0, cores=cores, sharing={1: 1.0, 8: 1.0})
    sizes = {"tflops": {"fp32": 0.001}, "memory_gb": 4.0, "memory_gbps": 10.0, "link_gbps": 1.0, "network_gbps": 1.0}
    return qs.Hardware(name="cpu", reserved_gb=0, measured=measured, **sizes)


def of_ranks(**given: int) -> qs.Strategy:
    ranks = given.get("dp", 1) * given.get("pp", 1) * given.get("tp", 1)
    return qs.Strategy(gpus=ranks, batch=64, seq=MODEL.seq, dtype="fp32", **given)


@dataclass
class Shared:
    """1F1B pipelines whose ranks share cores, all that compute getting equal parts, one core at most."""

    pp: int
    microbatches: int
    replicas: int
    cores: int
    forward: float = 1.0
    backward: float = 2.0
    done: set[tuple[int, type, int, int]] = field(default_factory=set)

    def makespan(self) -> float:
        plan = qs.compile("1f1b", mesh={"pp": self.pp}, microbatches=self.microbatches)
        computes = [[i for i in program if isinstance(i, Fwd | Bwd)] for program in plan.programs]
        left = {(replica, rank): [*computes[rank]] for replica in range(self.replicas) for rank in range(self.pp)}
        work = dict.fromkeys(left, 0.0)
        now = 0.0
        while any(left.values()):
            active = [place for place in left if left[place] and self._is_ready(*place, left[place][0])]
            for place in active:
                work[place] = work[place] or (self.forward if isinstance(left[place][0], Fwd) else self.backward)
            rate = min(1.0, self.cores / len(active))
            passed = min(work[place] for place in active) / rate
            now += passed
            for place in active:
                work[place] -= passed * rate
                if work[place] < 1e-9:
                    work[place] = 0.0
                    instruction = left[place].pop(0)
                    self.done.add((place[0], type(instruction), instruction.stage, instruction.microbatch))
        return now

    def _is_ready(self, replica: int, rank: int, instruction: Fwd | Bwd) -> bool:
        before = rank - 1 if isinstance(instruction, Fwd) else rank + 1
        known = (replica, type(instruction), before, instruction.microbatch)
        return not 0 <= before < self.pp or known in self.done


@pytest.mark.parametrize("cores", [1, 2, 3, 4])
@pytest.mark.parametrize(("dp", "pp", "microbatch"), [(1, 2, 8), (1, 4, 8), (2, 2, 4), (1, 8, 4), (2, 4, 4), (4, 2, 2)])
def test_pipelines_take_as_long_as_simulated(dp: int, pp: int, microbatch: int, cores: int) -> None:
    """Layers alone are compared: one without an embedding and a head is the same on all ranks."""
    microbatches = 64 // (dp * microbatch)
    own = qs.predict(MODEL, hardware(cores), of_ranks(dp=dp, pp=pp, microbatch=microbatch)).step_s
    alone = qs.predict(MODEL, hardware(1), of_ranks(microbatch=64)).step_s  # all work, on one core
    unit = alone / (3 * microbatches * pp * dp)
    simulated = Shared(pp, microbatches, dp, cores).makespan() * unit
    assert own == pytest.approx(simulated, rel=0.05)
