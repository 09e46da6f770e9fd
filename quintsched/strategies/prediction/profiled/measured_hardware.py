"""Hardware with the rates of measured steps, in place of the datasheet's.

    seconds of products, passes, communication ────┐
                                                   ├──▶ slowdown by kind ──▶ hardware that is slower by this factor
    as `operators`, `operator_device_times` say ───┘

Both are for the strategy under which the step was measured. The model predicts how they change with the strategy, the
sizes and the number of nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from quintsched.errors import UsageError
from quintsched.strategies.descriptions.hardware import Curve, Hardware
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import Strategy, modules_of
from quintsched.strategies.descriptions.strategy_validity import stage_layers
from quintsched.strategies.prediction import operators
from quintsched.strategies.prediction.layers_of_ranks import recomputed_layers
from quintsched.strategies.prediction.memory.activations import ActivationSizes, block_input, block_kept
from quintsched.strategies.prediction.operator_device_times import operator_times
from quintsched.strategies.prediction.operators import AttentionKernel, MemoryOp, Operator, Product
from quintsched.strategies.prediction.predict_one_strategy import predict
from quintsched.strategies.prediction.strategy_columns import Table
from quintsched.strategies.prediction.vectorized_prediction import sizes_of
from quintsched.strategies.profiles.profile import Profile, ProfiledStep

CORRECTIONS = 4
"""Number of corrections of the rates: because of kernel launches, times are not exactly proportional."""
COMMUNICATION = ("tp", "cp", "ep", "pp", "dp")

KINDS: dict[type[Operator], str] = {Product: "product", AttentionKernel: "attention", MemoryOp: "pass"}


def measured_hardware(hardware: Hardware, profile: Profile) -> Hardware:
    """Return the hardware with the rates of a profile's steps, weighted by their time, and of its all-reduces."""
    if not profile.steps:
        raise UsageError(f"{profile.name}: the profile has no steps to take rates from")
    for _ in range(CORRECTIONS):
        took, expected = _sums(hardware, profile.steps)
        hardware = _slowed(hardware, _ratios(took, expected))
    if sums := profile.collectives.get("all_reduce"):
        measured = hardware.measured.model_copy(update={"all_reduce": sums, "kept": _kept(profile)})
        hardware = hardware.model_copy(update={"measured": measured})
    if profile.message:
        hardware = hardware.model_copy(update={"link_gbps": profile.message.rates[-1] / 1e9 / hardware.constants.link})
    return hardware


def _kept(profile: Profile) -> dict[int, float]:
    """Return the activations that a layer was measured to keep, relative to those predicted, by tp."""
    model, strategy = profile.steps[0].model, profile.steps[0].strategy
    sizes = {tp: ActivationSizes(1, strategy.seq, tp=tp, sequence_parallel=1) for tp in profile.kept}
    whole = block_input(model, ActivationSizes(1, strategy.seq))
    kept = {tp: sum(block_kept(model, each, model.kinds[-1]).values()) for tp, each in sizes.items()}
    return {tp: float(measured * whole / kept[tp]) for tp, measured in profile.kept.items()}


@dataclass(frozen=True)
class Slower:
    """Ratios of measured to expected time."""

    compute: float = 1.0
    memory: float = 1.0
    communication: float = 1.0


def _sums(hardware: Hardware, steps: tuple[ProfiledStep, ...]) -> tuple[dict[str, float], dict[str, float]]:
    """Return seconds by kind of work, measured and expected, of all steps together."""
    took, expected = dict[str, float](), dict[str, float]()
    for step in steps:
        for kind, seconds in step.seconds.items():
            took[kind] = took.get(kind, 0.0) + seconds
        for name, seconds in work_s(step.model, hardware, step.strategy).items():
            expected[name] = expected.get(name, 0.0) + seconds
    return took, expected


def _ratios(took: Mapping[str, float], expected: Mapping[str, float]) -> Slower:
    def ratio(*kinds: str) -> float:
        measured, known = (sum(seconds.get(kind, 0.0) for kind in kinds) for seconds in (took, expected))
        return measured / known if measured and known else 1.0

    if "block" in took:
        everything = {"block": sum(expected.get(kind, 0.0) for kind in ("product", "attention", "pass"))}
        alike = took["block"] / everything["block"] if everything["block"] else 1.0
        return Slower(alike, alike, ratio("communication"))
    return Slower(ratio("product", "attention"), ratio("pass"), ratio("communication"))


def _slowed(hardware: Hardware, slower: Slower) -> Hardware:
    measured = hardware.measured
    curves: dict[str, object] = {
        "matmul": {dtype: _curve(curve, slower.compute) for dtype, curve in measured.matmul.items()},
        "attention": {dtype: _curve(curve, slower.compute) for dtype, curve in measured.attention.items()},
        "memory": measured.memory and _curve(measured.memory, slower.memory),
        "link": measured.link and _curve(measured.link, slower.communication),
        "all_reduce": {n: _curve(curve, slower.communication) for n, curve in measured.all_reduce.items()},
    }
    changed = {
        "efficiency": hardware.efficiency / slower.compute,
        "memory_gbps": hardware.memory_gbps / slower.memory,
        "link_gbps": hardware.link_gbps / slower.communication,
        "network_gbps": hardware.network_gbps / slower.communication,
        "measured": measured.model_copy(update=curves),
    }
    return hardware.model_copy(update=changed)


def _curve(curve: Curve, slower: float) -> Curve:
    return Curve(sizes=curve.sizes, rates=tuple(rate / slower for rate in curve.rates))


def work_s(model: Model, hardware: Hardware, strategy: Strategy) -> dict[str, float]:
    """Return the expected seconds of a step on an average GPU, by kind of work: "product", "attention", "pass" and
    "communication"."""
    table = Table.from_strategies([strategy])
    sizes = sizes_of(table, strategy.dtype)
    seconds = dict.fromkeys(KINDS.values(), 0.0)

    def add(operator: Operator, times: float, rerun: float) -> None:
        took = operator_times(operator, hardware, strategy.dtype)
        selective = took.forward * (operator.module in modules_of(strategy.recompute))
        total = took.forward * (1 + rerun) + took.backward + selective
        seconds[KINDS[type(operator)]] += float(total[0]) * times * strategy.microbatches / strategy.pp

    again = _recomputed(model, strategy)
    for place, layers in Counter(model.layer_kinds).items():
        for operator in operators.block(model, sizes, model.kinds[place]):
            add(operator, float(layers), again)
    for operator in (*operators.embedding(model, sizes), *operators.head(model, sizes)):
        add(operator, 1.0, 0.0)
    terms = predict(model, hardware, strategy).breakdown_s
    seconds["communication"] = sum(
        value for name, value in terms.items() if name.removesuffix("_hidden") in COMMUNICATION
    )
    return seconds


def _recomputed(model: Model, strategy: Strategy) -> float:
    """Return the fraction of layers that are fully recomputed."""
    layers = strategy.stages or stage_layers(model.layers, strategy.pp * (strategy.chunks or 1))
    return sum(recomputed_layers(layers, strategy.recompute)) / model.layers
