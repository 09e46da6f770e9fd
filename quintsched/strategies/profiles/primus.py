"""Reader of Primus' benchmark files (`primus projection performance --save-benchmark FILE.json`): times of layers.

    {"schema_version": 2,
     "metadata": {"benchmark_ep": 1, "bench_training_config_summary": {"num_layers": 2, "moe_pattern": [0, 1], …}},
     "profiling_results": {"0": {"type": "dense", "forward_time_ms": 3.1, "backward_time_ms": 6.4, …},
                           "embedding": {…}, "output": {…}}}

Its layers, embedding and head together are one measured step of one microbatch, without the exchange of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quintsched.errors import InputError, UsageError
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.profiles.profile import Profile, ProfiledStep

SUMMARY = "/metadata/bench_training_config_summary"
TIMES = ("forward_time_ms", "backward_time_ms")
EXCHANGES = ("a2a_forward_time_ms", "a2a_backward_time_ms")
ENDS = ("embedding", "output")
CUT = ("tensor_model_parallel_size", "context_model_parallel_size", "pipeline_model_parallel_size")
"""Sizes that have to be 1: a layer's times would include reductions."""


def from_benchmark(content: Mapping[str, Any], model: Model, source: str) -> Profile:
    """Return the profile of a model; raises `InputError` for a broken file, `UsageError` for one of cut layers."""
    try:
        summary = content["metadata"]["bench_training_config_summary"]
        pattern = tuple(bool(one) for one in summary["moe_pattern"]) or (False,) * int(summary["num_layers"])
        samples, seq = int(summary["micro_batch_size"]), int(summary["sequence_length"])
        sizes = {name: int(summary.get(name) or 1) for name in CUT}
        ep = int(content["metadata"].get("benchmark_ep") or 1)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{source}: {SUMMARY}: {error}; files of Primus' schema 2 have it") from None
    for name in (one for one, size in sizes.items() if size > 1):
        raise UsageError(f"{source}: its layers were cut ({name}={sizes[name]}); take one with that size of 1")
    if summary.get("recompute_granularity"):
        raise UsageError(f"{source}: its layers were recomputed; take one without recomputation")
    strategy = Strategy(gpus=ep, ep=ep, microbatch=samples, batch=samples * ep, seq=seq)
    results = content["profiling_results"]
    seconds = sum(_seconds(results, str(layer), source) for layer in range(len(pattern)))
    seconds += sum(_seconds(results, name, source) for name in ENDS if name in results)
    cut = _cut(model, pattern, summary.get("num_experts"), seq, source)
    step = ProfiledStep(model=cut, strategy=strategy, seconds={"block": seconds})
    return Profile(name=f"Primus' profile of {model.name}", source=source, steps=(step,))


def _cut(model: Model, pattern: tuple[bool, ...], experts: Any, seq: int, source: str) -> Model:
    """Return the model with the layers that were measured."""
    changed: dict[str, Any] = {"layers": len(pattern), "seq": max(model.seq, seq)}
    if model.experts is not None:
        first = pattern.index(True) if any(pattern) else len(pattern)
        counted = {"first_dense": first, "every": 1, "count": int(experts or model.experts.count)}
        changed["experts"] = model.experts.model_copy(update=counted) if any(pattern) else None
    found = model.model_copy(update=changed)
    if found.has_experts != pattern:
        raise InputError(f"{source}: {SUMMARY}/moe_pattern: {model.name} has no such layers in a row")
    return found


def _seconds(results: Mapping[str, Any], name: str, source: str) -> float:
    """Return the seconds of a layer, forward and backward, without the exchange of tokens."""
    place = f"{source}: /profiling_results/{name}"
    one = results.get(name)
    if not isinstance(one, Mapping):
        raise InputError(f"{place}: the times of this layer are missing")
    exchanges = one.get("mlp")
    times: list[Any] = [one.get(key) for key in TIMES]
    away: list[Any] = [exchanges.get(key) or 0.0 for key in EXCHANGES] if isinstance(exchanges, Mapping) else []
    for value in (*times, *away):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
            raise InputError(f"{place}: {' and '.join(TIMES)} are milliseconds")
    return float(sum(times) - sum(away)) / 1e3
