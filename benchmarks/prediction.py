"""Predictions of step times beside published measurements: ours, and the formulas of others.

    python benchmarks/prediction.py                      every table, every predictor
    python benchmarks/prediction.py mpt_a100 --rows      one table, row by row
    python benchmarks/prediction.py --rows-of FILE.json  your own rows: flags of `quintsched predict`, and measured_s

    data/*.json ──▶ rows ──▶ predictors ──▶ mean error, bias, Kendall's tau, regret, fit in memory

`data/protocol.json` lists the tables that constants are fitted on, the constants with their sources, and the tables
that are tests. Where a source omits the size of microbatches or the number
of chunks, the fastest that fits is taken, by our own model. The exit code is 1 where our error is beyond LIMITS.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from quintsched.strategies.descriptions.flag_rows import PredictionRow, read_row
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.prediction.operator_device_times import peak
from quintsched.strategies.prediction.predict_one_strategy import model_flops, predict
from quintsched.strategies.prediction.predicted_collectives import all_reduce_s
from quintsched.strategies.tuning.published_recipes import RECIPES, chosen

DATA = Path(__file__).parent / "data"
TABLES = (
    "korthikanti",
    "megatron_table1",
    "megatron_table2",
    "mpt_a100",
    "mpt_h100",
    "simumax_b200",
    "simumax_a100_pcie",
    "nemo_h100",
    "torchtitan_h100",
    "bridge_26_02",
)
LIMITS = {
    "korthikanti": 0.0365,
    "megatron_table1": 0.06,
    "megatron_table2": 0.08,
    "mpt_a100": 0.08,
    "mpt_h100": 0.10,
    "simumax_b200": 0.08,
    "simumax_a100_pcie": 0.03,
}
"""Mean absolute errors beyond which the exit code is 1."""
MEMORY_LIMITS = {"simumax_b200": 0.01, "simumax_a100_pcie": 0.015}
"""The same for memory, where a table has it."""
NOT_FLAGS = (
    "name",
    "source",
    "limit",
    "open",
    "model_tflops",
    "measured_s",
    "measured_gib",
    "theirs_s",
    "theirs_gib",
    "tflops",
    "group",
    "tokens_per_s_per_gpu",
)
USUAL_MFU = 0.40
"""Share of the peak (MFU) in the simple rule."""
USUAL_SHARE = 0.55
"""Share of the peak in Megatron-LM's formula: about the value that its authors reach, without bubbles."""


@dataclass(frozen=True)
class Case:
    """One measured run, with its strategy, or the best of the candidates for it."""

    row: PredictionRow
    measured_s: float
    group: str | None
    """Runs of one group are alternatives to each other."""
    measured_bytes: float | None = None
    """Most bytes that tensors took on a rank."""


@dataclass(frozen=True)
class Score:
    """Errors of a predictor on a table."""

    error: float
    bias: float
    tau: float
    regret: float | None
    """Mean slowdown of the run that it would choose of each group."""


def main() -> int:
    """Print the errors of all predictors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(TABLES)}, recipes and primus; default: all")
    parser.add_argument("--rows", action="store_true", help="show every row")
    parser.add_argument("--rows-of", type=Path, help="a table of your own")
    arguments = parser.parse_args()
    names = [] if arguments.rows_of else arguments.tables or [*TABLES, "recipes", "primus"]
    sources = [(name, DATA / f"{name}.json") for name in names if name not in ("recipes", "primus")]
    sources += [(arguments.rows_of.stem, arguments.rows_of)] if arguments.rows_of else []
    beyond = False
    for name, path in sources:
        cases = read_cases(json.loads(path.read_text()))
        for predictor, function in PREDICTORS.items():
            found = [function(case.row) for case in cases]
            score = score_of(cases, found)
            print(f"{name:16} {predictor:9} {_shown(score)}")
            if predictor == "ours":
                _print_rows(cases, found, arguments.rows)
                beyond |= score.error > LIMITS.get(name, np.inf)
        if cases[0].measured_bytes is not None:
            errors = memory_errors(cases)
            print(f"{name:16} memory    error {fmean(map(abs, errors)):6.2%}  bias {fmean(errors):+7.2%}")
            beyond |= fmean(map(abs, errors)) > MEMORY_LIMITS.get(name, np.inf)
    if "recipes" in names:
        beyond |= print_recipes(json.loads(RECIPES.read_text()))
    if "primus" in names:
        print_primus(json.loads((DATA / "primus.json").read_text()))
    return int(beyond)


def read_cases(table: dict[str, Any] | list[dict[str, Any]]) -> list[Case]:
    """Return the runs of a table; settings that its `choose` leaves open are filled in."""
    choose = {} if isinstance(table, list) else table.get("choose", {})
    return [_case(row, choose) for row in rows_of(table)]


def rows_of(table: dict[str, Any] | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a table with the settings that they share, and with the models that it describes."""
    if isinstance(table, list):
        return table
    settings = dict(table.get("settings", {}))
    if str(settings.get("hardware")).endswith(".json"):
        settings["hardware"] = DATA / settings["hardware"]
    return [settings | _with_model(row, table.get("models", {})) for row in table["rows"]]


def _with_model(row: dict[str, Any], models: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the model that its table describes under the name, with the row's number of layers."""
    if row["model"] not in models:
        return row
    layers = {"layers": row["layers"]} if "layers" in row else {}
    return {name: value for name, value in row.items() if name != "layers"} | {"model": models[row["model"]] | layers}


def _case(row: dict[str, Any], choose: dict[str, Any]) -> Case:
    flags = {name: value for name, value in row.items() if name not in NOT_FLAGS}
    choose = choose or row.get("open", {})
    asked = chosen(flags, choose) if choose else read_row(flags)
    flops = megatron_flops(asked.model, asked.strategy)
    if "model_tflops" in row:
        flops = model_flops(asked.model, asked.strategy.seq) * asked.strategy.batch
    measured_s = row.get("measured_s") or flops / (row.get("model_tflops") or row["tflops"]) / 1e12 / row["gpus"]
    gib = row.get("measured_gib")
    return Case(asked, measured_s, row.get("group"), gib * 2**30 if gib else None)


def ours(row: PredictionRow) -> float:
    """Return our own prediction."""
    return predict(row.model, row.hardware, row.strategy).step_s


def simple_rule(row: PredictionRow) -> float:
    """Return six operations for each parameter and token, at a usual share of the peak."""
    tokens = row.strategy.batch * row.strategy.seq
    return 6 * _parameters(row.model) * tokens / (USUAL_MFU * _peak(row))


def megatron_formula(row: PredictionRow) -> float:
    """Narayanan et al. 2021: operations with full recomputation, at a usual share, and the pipeline's bubble."""
    s = row.strategy
    flops = megatron_flops(row.model, s) * (1.0 if s.recompute == "full" else 0.75)
    bubble = (s.pp - 1) / ((s.chunks or 1) * s.microbatches)
    return flops / (USUAL_SHARE * _peak(row)) * (1 + bubble)


def roofline(row: PredictionRow) -> float:
    """Return a prediction in Calculon's manner: a block's products at a fixed share, memory traffic, tp's all-reduces.

    Like Calculon it leaves out the embedding and the head; gradients are added up after the last backward.
    """
    model, s, hardware = row.model, row.strategy, row.hardware
    tokens = float(s.microbatch * s.seq)
    hidden = float(model.hidden)
    flops = 24 * tokens * hidden**2 * (1 + s.seq / (6 * hidden)) / s.tp
    scores = s.microbatch * model.heads * s.seq**2 / s.tp if model.attention == "unfused" else 0.0
    moved = 2 * tokens * hidden * (14 + 22 / s.tp) + 9 * scores
    forward = flops / (0.80 * _peak(row) / s.gpus) + moved / (0.85 * hardware.memory_gbps * 1e9)
    waits = float(all_reduce_s(np.array([2 * tokens * hidden]), np.array([s.tp]), np.array([1]), hardware)[0])
    passes = 3 + (1 if s.recompute == "full" else 0)
    of_layer = passes * forward + (4 + 2 * (s.recompute == "full")) * waits
    whole = model.layers / s.pp * of_layer * (s.microbatches + (s.pp - 1) / (s.chunks or 1))
    weights = 12 * model.layers * hidden**2 / s.tp / s.pp
    replicas, stride = np.array([s.dp]), np.array([s.tp])
    summed = float(all_reduce_s(np.array([2 * weights]), replicas, stride, hardware)[0])
    shards = s.dp if s.zero else 1
    return float(whole + summed + 30 * weights / shards / (0.85 * hardware.memory_gbps * 1e9))


PREDICTORS: dict[str, Callable[[PredictionRow], float]] = {
    "ours": ours,
    "roofline": roofline,
    "megatron": megatron_formula,
    "6ND": simple_rule,
}


def megatron_flops(model: Model, strategy: Strategy) -> float:
    """Narayanan et al. 2021, equation 3: operations of a step with full recomputation."""
    h, layers, seq = model.hidden, model.layers, strategy.seq
    return 96 * strategy.batch * seq * layers * h**2 * (1 + seq / (6 * h) + model.vocab / (16 * layers * h))


def _parameters(model: Model) -> float:
    return model_flops(model, 1) / 6


def _peak(row: PredictionRow) -> float:
    return peak(row.hardware, row.strategy.dtype) * row.strategy.gpus


def score_of(cases: list[Case], predicted: list[float]) -> Score:
    """Return the errors of a table's predictions."""
    errors = [found / case.measured_s - 1 for case, found in zip(cases, predicted, strict=True)]
    measured = [case.measured_s for case in cases]
    return Score(fmean(map(abs, errors)), fmean(errors), kendall_tau(measured, predicted), _regret(cases, predicted))


def memory_errors(cases: list[Case]) -> list[float]:
    """Return the errors of the bytes that tensors take, without what allocator, driver and libraries reserve."""
    errors = []
    for case in cases:
        held = predict(case.row.model, case.row.hardware, case.row.strategy).breakdown_bytes
        tensors = sum(bytes_ for name, bytes_ in held.items() if name not in ("reserved", "fragmentation"))
        errors.append(tensors / (case.measured_bytes or np.nan) - 1)
    return errors


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the share of pairs in the same order less that of pairs in the opposite one."""
    signs = [np.sign((a[0] - b[0]) * (a[1] - b[1])) for a, b in combinations(zip(one, other, strict=True), 2)]
    return float(fmean(signs)) if signs else 1.0


def _regret(cases: list[Case], predicted: list[float]) -> float | None:
    groups: dict[str, list[tuple[float, float]]] = {}
    for case, found in zip(cases, predicted, strict=True):
        if case.group:
            groups.setdefault(case.group, []).append((found, case.measured_s))
    lost = [min(runs)[1] / min(run[1] for run in runs) - 1 for runs in groups.values()]
    return fmean(lost) if lost else None


def _shown(score: Score) -> str:
    regret = "" if score.regret is None else f"  regret {score.regret:6.2%}"
    return f"error {score.error:6.2%}  bias {score.bias:+7.2%}  tau {score.tau:5.2f}{regret}"


def _print_rows(cases: list[Case], predicted: list[float], every: bool) -> None:
    fits = [predict(case.row.model, case.row.hardware, case.row.strategy).fits for case in cases]
    print(f"{'':26} {sum(fits)} of {len(fits)} runs, all of which ran, fit in memory as predicted")
    for case, found in zip(cases, predicted, strict=True) if every else ():
        s = case.row.strategy
        axes = f"tp={s.tp} pp={s.pp} dp={s.dp} seq={s.seq} microbatch={s.microbatch} chunks={s.chunks or 1}"
        error = found / case.measured_s - 1
        print(f"    {case.row.model.name:15} {axes:58} {case.measured_s:9.3f} s {found:9.3f} s {error:+7.1%}")


def print_recipes(table: dict[str, Any]) -> bool:
    """Print published recipes beside their predictions; return whether one does not fit, or is beyond its limit."""
    beyond = False
    for row, case in zip(table["rows"], read_cases(table), strict=True):
        found = predict(case.row.model, case.row.hardware, case.row.strategy)
        error = found.step_s / case.measured_s - 1
        is_beyond = abs(error) > row["limit"] or not found.fits
        beyond |= is_beyond
        print(
            f"{row['name']:26} {case.measured_s:7.2f} s {found.step_s:7.2f} s {error:+7.1%} of {row['limit']:.0%}"
            f" {found.memory_bytes / 1e9:6.1f} GB{' beyond' if is_beyond else ''}"
        )
    return beyond


def print_primus(table: dict[str, Any]) -> None:
    """Print the rank correlation of schedules, over the sizes that the source leaves open."""
    speeds = [row["tokens_per_s_per_gpu"] for row in table["rows"]]
    found = []
    for microbatch, microbatches, seq in product(*(table["open"][name] for name in table["open"])):
        sizes = {"microbatch": microbatch, "batch": microbatch * microbatches, "seq": seq}
        flags = [{name: value for name, value in row.items() if name not in NOT_FLAGS} for row in table["rows"]]
        times = [ours(read_row({**one, **sizes})) for one in flags]
        found.append(kendall_tau(speeds, [1 / time for time in times]))
        print(f"primus           ours      microbatch {microbatch}, {microbatches} microbatches: tau {found[-1]:5.2f}")
    print(f"primus           ours      mean tau {fmean(found):5.2f}, between {min(found):.2f} and {max(found):.2f}")


if __name__ == "__main__":
    sys.exit(main())
