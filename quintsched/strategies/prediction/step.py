"""One strategy: how long its step takes and what it holds; the table with one row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from quintsched.arguments import ours, takes
from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.placement import check
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.prediction.columns import Table
from quintsched.strategies.prediction.efficiency import CONSTANTS, Constants, peak
from quintsched.strategies.prediction.operators import Attention, Operator, Product, Sizes, block, embedding, head
from quintsched.strategies.prediction.table import evaluate, held


@dataclass(frozen=True)
class Prediction:
    """What a step of one strategy takes and holds."""

    model: Model
    hardware: Hardware
    strategy: Strategy
    """With its schedule and chunks filled in."""
    step_s: float
    tokens_per_s: float
    """Over all GPUs."""
    mfu: float
    """Share of the datasheet's peak that the model's own operations make, recomputation left out, attention counted
    without its causal mask."""
    fits: bool
    memory_bytes: float
    """Of the fullest rank."""
    memory_bytes_per_rank: tuple[float, ...]
    """By pipeline rank."""
    breakdown_s: dict[str, float]
    """Terms that do not end in `_hidden` add up to `step_s`."""
    breakdown_bytes: dict[str, float]
    """Of the fullest rank; adds up to `memory_bytes`."""


@takes(
    "predict(find_model('gpt3-175b'), find_hardware('a100-80gb'), strategy)",
    model=ours("Model"),
    hardware=ours("Hardware"),
    strategy=ours("Strategy"),
)
def predict(model: Model, hardware: Hardware, strategy: Strategy, constants: Constants = CONSTANTS) -> Prediction:
    """Return the time and memory of a strategy.

    Raises UsageError where it cannot be placed.
    """
    check(model, hardware, strategy)
    table = Table.of([strategy])
    found = evaluate(model, hardware, table, constants, simulate=True)
    of_ranks, _ = held(model, hardware, table, each_rank=True)
    step_s, memory = float(found.step_s[0]), float(found.memory_bytes[0])
    tokens = strategy.batch * strategy.seq
    flops = model_flops(model, strategy.seq) * strategy.batch
    return Prediction(
        model=model,
        hardware=hardware,
        strategy=table.strategy(0),
        step_s=step_s,
        tokens_per_s=tokens / step_s,
        mfu=flops / step_s / strategy.gpus / peak(hardware, strategy.dtype),
        fits=bool(found.fits[0]),
        memory_bytes=memory,
        memory_bytes_per_rank=tuple(np.sum([bytes_[0] for bytes_ in of_ranks.values()], axis=0).tolist()),
        breakdown_s={name: float(values[0]) for name, values in found.seconds.items()},
        breakdown_bytes={name: float(values[0]) for name, values in found.bytes.items()},
    )


def model_flops(model: Model, seq: int) -> float:
    """Return the operations of matrix products of one sample, forward and backward, attention without its mask.

    What fills up experts is none of the model's own.
    """
    if model.experts is not None:
        model = model.model_copy(update={"experts": model.experts.model_copy(update={"padded_to": None})})
    one = np.ones(1)
    sizes = Sizes(tp=one, cp=one, ep=one, sequence_parallel=0 * one, microbatch=one, seq=seq * one, width=one)
    mixed = sum(model.has_experts)
    layers = (model.layers - mixed) * _flops(model, block(model, sizes, experts=False))
    if mixed:
        layers += mixed * _flops(model, block(model, sizes, experts=True))
    return 3.0 * (layers + _flops(model, embedding(model, sizes)) + _flops(model, head(model, sizes)))


def _flops(model: Model, operators: Iterable[Operator]) -> float:
    """Operations of a forward."""
    seen = 0.5 if model.causal else 1.0
    found = 0.0
    for operator in operators:
        if isinstance(operator, Product):
            found += float((2.0 * operator.batch * operator.m * operator.n * operator.k).item())
        elif isinstance(operator, Attention):
            found += float(operator.flops.item()) / seen
    return found
