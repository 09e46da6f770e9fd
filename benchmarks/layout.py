"""Cuts of unlike layers with their schedules, beside interleaved 1F1B with even stages at equal memory.

    python benchmarks/layout.py [--seconds 60] [--effort 2]

The models are those on which AdaPtis (arXiv:2509.23722) compares: Gemma (a vocabulary of 256,000), DeepSeek (dense
layers, then experts, and multi-token prediction) and Nemotron-H (Mamba, attention and feed-forward layers in turn).
Times of Gemma and DeepSeek are those of `predict`, those of Nemotron-H its operations at one rate.
"""

from __future__ import annotations

import argparse
import math
import time
from itertools import groupby

import quintsched as qs
from quintsched.solve import LayerCosts, cut_stages
from quintsched.solve.stage_cuts.layer_costs import Layers
from quintsched.strategies.prediction.layer_times import layer_costs

GEMMA = {"activation": "geglu", "norm": "rmsnorm", "positions": "rope", "biases": False, "dropout": False}
MODELS = {
    "gemma-2b": {**GEMMA, "layers": 26, "hidden": 2304, "heads": 8, "kv_heads": 4, "head_size": 256, "ffn": 9216},
    "gemma-9b": {**GEMMA, "layers": 42, "hidden": 3584, "heads": 16, "kv_heads": 8, "head_size": 256, "ffn": 14336},
    "gemma-27b": {**GEMMA, "layers": 46, "hidden": 4608, "heads": 32, "kv_heads": 16, "head_size": 128, "ffn": 36864},
}
"""Gemma 2 (arXiv:2408.00118), with its head apart from the embedding, as pipelines hold it."""
NEMOTRON = {
    "nemotron-h-8b": ("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 4096, 21504, 32, 128),
    "nemotron-h-56b": ("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-" * 2 + "M-M-M-M*-", 8192, 32768, 64, 256),
}
"""Patterns of layers (M: Mamba 2, *: attention, -: feed-forward), hidden, ffn, heads, and state of Mamba
(arXiv:2504.03624; the pattern of the larger one is as dense, of 113 layers)."""
SEQ, RATE = 4096, 400e12
SIZES = ((4, 16), (8, 32))
"""Pipeline ranks and microbatches."""


def predicted(name: str, pp: int, microbatches: int) -> LayerCosts:
    """Return the layer costs of a model that `predict` knows."""
    if name == "deepseek-v3":
        strategy = qs.Strategy(gpus=8 * pp, pp=pp, ep=8, batch=8 * microbatches, seq=SEQ, zero=1, recompute="selective")
        return layer_costs(qs.find_model(name), qs.find_hardware("h100"), strategy, mtp=1)
    model = qs.find_model({"name": name, "vocab": 256128, "tied": False, "seq": SEQ, **MODELS[name]})
    strategy = qs.Strategy(gpus=pp, pp=pp, batch=microbatches, seq=SEQ)
    return layer_costs(model, qs.find_hardware("h100"), strategy)


def nemotron(name: str) -> LayerCosts:
    """Return the layer costs of Nemotron-H by its matrix products and scans."""
    pattern, hidden, ffn, heads, state = NEMOTRON[name]
    inner, groups = 2 * hidden, 8
    weights = {
        "-": 2 * hidden * ffn,
        "*": 2 * hidden * hidden + 2 * hidden * 8 * 128,
        "M": hidden * (2 * inner + 2 * groups * state + inner // 64) + inner * hidden,
    }
    extra = {"-": 0, "*": SEQ * heads * 128, "M": 4 * inner * state}
    kept = {"-": 2 * hidden + 2 * ffn, "*": 12 * hidden, "M": 12 * inner}

    def layer(kind: str, number: int) -> dict[str, object]:
        products, scan = (2 * SEQ * count / RATE * 1e3 for count in (weights[kind], extra[kind]))
        times = {"forward": products + scan, "backward_input": products + 2 * scan, "backward_weight": products}
        return {"count": number, **times, "activation": 2 * SEQ * kept[kind] / 1e9, "state": 18 * weights[kind] / 1e9}

    head = 2 * SEQ * hidden * 131072 / RATE * 1e3
    vocabulary = 18 * hidden * 131072 / 1e9
    layers = [
        {"kind": "embedding", "forward": 0.05, "state": vocabulary},
        *(layer(kind, len(list(group))) for kind, group in groupby(pattern)),
        {"kind": "loss", "forward": head, "activation": 4 * SEQ * 131072 / 1e9, "state": vocabulary},
    ]
    return LayerCosts.model_validate({"layers": layers, "p2p": 0.1})


def least_time(costs: LayerCosts, pp: int, microbatches: int) -> float:
    """Return what no cut and no order can be faster than: the whole work over all ranks, or the largest layer."""
    names = ("forward", "backward_input", "backward_weight")
    whole = sum(float(Layers.of(costs).sums[name][-1]) for name in names)
    largest = max(sum(layer.amount(name) for name in names) for layer in costs.layers)
    return microbatches * max(whole / pp, largest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--effort", type=int, default=2)
    options = parser.parse_args()
    print(
        "model           pp   m  interleaved  its memory  cut alone       best  chunks  schedule   gain  at most      s"
    )
    gains, alone, most = [], [], []
    for name in (*MODELS, "deepseek-v3", *NEMOTRON):
        for pp, microbatches in SIZES:
            began = time.monotonic()
            costs = nemotron(name) if name in NEMOTRON else predicted(name, pp, microbatches)
            sizes = {"pp": pp, "microbatches": microbatches, "effort": options.effort, "seconds": options.seconds / 3}
            cut = cut_stages(costs, chunks=2, **sizes)
            base, cap = cut.even.value, max(cut.even.peaks)
            found = [
                cut_stages(costs, chunks=chunks, schedules=["auto"], memory_cap=cap, **sizes).best for chunks in (1, 2)
            ]
            best = min(found, key=lambda one: one.value)
            taken = time.monotonic() - began
            gains.append(base / best.value)
            alone.append(base / cut.best.value)
            most.append(base / least_time(costs, pp, microbatches))
            print(
                f"{name:14} {pp:3} {microbatches:3} {base:12.1f} {cap:11.1f} {cut.best.value:10.1f} {best.value:10.1f} "
                f"{len(best.stage_to_pp) // pp:7}  {best.schedule:9} {gains[-1]:5.2f} {most[-1]:8.2f} {taken:6.1f}",
                flush=True,
            )
    geometric = [math.exp(sum(map(math.log, found)) / len(found)) for found in (alone, gains, most)]
    print(
        f"geometric mean of the gain: {geometric[0]:.3f} by the cut alone, {geometric[1]:.3f} with the schedule; "
        f"none can gain more than {geometric[2]:.3f}"
    )


if __name__ == "__main__":
    main()
