"""Prediction of one strategy: a table with one row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from quintsched.check_call_arguments import ours, takes
from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import SHORT, Strategy
from quintsched.strategies.descriptions.strategy_validity import check
from quintsched.strategies.prediction.operator_device_times import peak
from quintsched.strategies.prediction.operators import (
    AttentionKernel,
    BlockSizes,
    Operator,
    Product,
    block,
    embedding,
    head,
)
from quintsched.strategies.prediction.simulated_strategy import simulated_step_s
from quintsched.strategies.prediction.strategy_columns import Table
from quintsched.strategies.prediction.vectorized_prediction import evaluate, held


@dataclass(frozen=True)
class Prediction:
    """Predicted time and memory of a step of one strategy."""

    model: Model
    hardware: Hardware
    strategy: Strategy
    """Strategy with its schedule and chunks filled in."""
    step_s: float
    fits: bool
    memory_bytes: float
    """Peak memory of the rank that holds most."""
    memory_bytes_per_rank: tuple[float, ...]
    """Peak memory by pipeline rank."""
    breakdown_s: dict[str, float]
    """Terms of the step time; those that do not end in `_hidden` add up to `step_s`."""
    breakdown_bytes: dict[str, float]
    """Terms of the memory of the rank that holds most; they add up to `memory_bytes`."""

    @property
    def waited_s(self) -> dict[str, float]:
        """Terms of the step time that add up to it."""
        return {name: value for name, value in self.breakdown_s.items() if not name.endswith("_hidden")}

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over all GPUs."""
        return self.strategy.batch * self.strategy.seq / self.step_s

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: fraction of the datasheet's peak (for fp8: in bf16) by the model's own FLOP, without
        recomputation, attention counted without its causal mask."""
        strategy = self.strategy
        flops = model_flops(self.model, strategy.seq) * strategy.batch
        dtype = "bf16" if strategy.dtype in SHORT else strategy.dtype
        return flops / self.step_s / strategy.gpus / peak(self.hardware, dtype)


@takes(
    "predict(find_model('gpt3-175b'), find_hardware('a100-80gb'), strategy)",
    model=ours("Model"),
    hardware=ours("Hardware"),
    strategy=ours("Strategy"),
)
def predict(model: Model, hardware: Hardware, strategy: Strategy) -> Prediction:
    """Predict the time and memory of a strategy.

    What copies to host memory add is simulated, as they wait for room and for each other. Raises UsageError if the
    strategy is invalid.
    """
    check(model, hardware, strategy)
    table = Table.from_strategies([strategy])
    found = evaluate(model, hardware, table, simulate=True)
    of_ranks, _ = held(model, hardware, table, each_rank=True)
    breakdown_s = {name: float(values[0]) for name, values in found.seconds.items()}
    if strategy.offload is not None:
        without = strategy.model_copy(update={"offload": None})
        with_copies, plain = (simulated_step_s(model, hardware, one) for one in (strategy, without))
        breakdown_s["offload"] = max(with_copies - plain, 0.0)
    step_s = float(found.step_s[0]) + breakdown_s.get("offload", 0.0)
    return Prediction(
        model=model,
        hardware=hardware,
        strategy=table.strategy(0),
        step_s=step_s,
        fits=bool(found.fits[0]),
        memory_bytes=float(found.memory_bytes[0]),
        memory_bytes_per_rank=tuple(np.sum([bytes_[0] for bytes_ in of_ranks.values()], axis=0).tolist()),
        breakdown_s=breakdown_s,
        breakdown_bytes={name: float(values[0]) for name, values in found.bytes.items()},
    )


def model_flops(model: Model, seq: int) -> float:
    """Return the FLOP of matrix products per sample, forward and backward, attention counted without its mask.

    Padding of experts does not count.
    """
    if model.experts is not None:
        model = model.model_copy(update={"experts": model.experts.model_copy(update={"padded_to": None})})
    one = np.ones(1)
    sizes = BlockSizes(tp=one, cp=one, ep=one, sequence_parallel=0 * one, microbatch=one, seq=seq * one, width=one)
    each = enumerate(model.kinds)
    layers = sum(model.layer_kinds.count(place) * _flops(model, block(model, sizes, kind)) for place, kind in each)
    return 3.0 * (layers + _flops(model, embedding(model, sizes)) + _flops(model, head(model, sizes)))


def _flops(model: Model, operators: Iterable[Operator]) -> float:
    """Return the FLOP of a forward."""
    seen = 0.5 if model.causal else 1.0
    found = 0.0
    for operator in operators:
        if isinstance(operator, Product):
            found += float((2.0 * operator.batch * operator.m * operator.n * operator.k).item())
        elif isinstance(operator, AttentionKernel):
            found += float(operator.flops.item()) / seen
    return found
