"""Fit of the six constants of `strategies.descriptions.hardware` to one published table, with its errors.

    python benchmarks/fit_cost_model.py            the constants, each row's error, and that with the row left out;
                                                   and the own constants of other GPUs, each from two runs

The table is Korthikanti et al. 2022: nine measured steps, and five forwards and backwards of one layer (which count
less: they are rounded to 0.1 ms). The objective is the sum of squared logarithms of predicted over measured, plus
a small penalty on each constant's distance from its start. Nothing else is ever fitted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prediction import NOT_FLAGS, rows_of

from quintsched.strategies.descriptions.flag_rows import read_row
from quintsched.strategies.descriptions.hardware import Constants
from quintsched.strategies.descriptions.presets_and_files import find_hardware, find_model
from quintsched.strategies.prediction.strategy_columns import Table
from quintsched.strategies.prediction.vectorized_prediction import distinct_blocks, evaluate

CONSTANTS = Constants()
DATA = Path(__file__).parent / "data"
START = Constants(product=0.85, half=200.0, memory=0.8, link=0.8, network=0.4, contention=0.2)
MOST = 0.98
"""Upper limit of a share."""
LAYERS_COUNT = 0.4
"""Weight of a layer's time beside a step's."""
STRAYING = 0.002
"""Weight of the squared logarithm of a constant over its starting value."""
OWN = ("mpt_h100", "simumax_b200")
"""Tables of GPUs that have an efficiency of their own."""
Vector = NDArray[np.float64]


def main() -> int:
    """Fit the constants and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    table = json.loads((DATA / "korthikanti.json").read_text())
    rows, layers = [table["settings"] | row for row in table["rows"]], table["layers_ms"]
    fitted = fit(rows, layers)
    print(f"fitted  {_shown(fitted)}\nfrozen  {_shown(CONSTANTS)}\n")
    errors = np.expm1(step_errors(rows, fitted))
    print(f"{'row':34} error   left out")
    left_out = []
    for number, (row, error) in enumerate(zip(rows, errors.tolist(), strict=True)):
        others = fit([*rows[:number], *rows[number + 1 :]], layers)
        left_out.append(float(np.expm1(step_errors([row], others))[0]))
        print(f"{row['model']:14} {row['recompute']:10} dp={row['dp']:<4} {error:+7.2%}  {left_out[-1]:+7.2%}")
    print(f"{'mean absolute, Table 5':34} {np.abs(errors[:8]).mean():6.2%}  {np.abs(left_out[:8]).mean():6.2%}")
    for name in OWN:
        rows, named = read_rows(name)
        print(f"{name}: efficiency {fit_efficiency(named):.3f}, from two of {len(rows)} runs")
        for model, (efficiency, error) in left_out_models(rows).items():
            print(f"    from all runs but those of {model}: {efficiency:.3f}; those are then {error:.1%} off")
    return 0


def left_out_models(rows: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return for each model the efficiency fitted on the runs of all others, and the mean error of its own runs."""
    names = [find_model(row["model"]).name for row in rows]
    found = {}
    for name in dict.fromkeys(names):
        apart = [
            [row for row, other in zip(rows, names, strict=True) if (other == name) is own] for own in (False, True)
        ]
        efficiency = fit_efficiency(apart[0])
        hardware = find_hardware(rows[0]["hardware"]).model_copy(update={"efficiency": efficiency})
        errors = np.expm1(step_errors([{**row, "hardware": hardware} for row in apart[1]], CONSTANTS))
        found[name] = efficiency, float(np.abs(errors).mean())
    return found


def read_rows(name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of a table, and those under its `fitted`."""
    table = json.loads((DATA / f"{name}.json").read_text())
    rows = rows_of(table)
    return rows, [rows[number] for number in table["fitted"]]


def fit(rows: list[dict[str, Any]], layers: list[dict[str, Any]]) -> Constants:
    """Return the constants fitted to these rows and layer times."""
    start = np.log(np.array([*vars(START).values()]))

    def loss(x: Vector) -> float:
        constants = _constants(np.exp(x))
        shares = [value for name, value in vars(constants).items() if name != "half"]
        over = sum(max(0.0, share - MOST) ** 2 for share in shares)
        parts = np.concatenate([step_errors(rows, constants), LAYERS_COUNT * layer_errors(layers, constants)])
        return float((parts**2).sum() + STRAYING * ((x - start) ** 2).sum() + 10 * over)

    return _constants(np.exp(minimise(loss, start)).round(4))


def step_errors(rows: list[dict[str, Any]], constants: Constants) -> Vector:
    """Return the logarithm of predicted over measured for each row."""
    found = []
    for row in rows:
        asked = read_row({name: value for name, value in row.items() if name not in NOT_FLAGS})
        hardware = asked.hardware.model_copy(update={"constants": constants})
        step_s = evaluate(asked.model, hardware, Table.from_strategies([asked.strategy])).step_s[0]
        found.append(np.log(step_s / row["measured_s"]))
    return np.array(found)


def layer_errors(layers: list[dict[str, Any]], constants: Constants) -> Vector:
    """Return the same for the forwards and backwards of a layer of the 22B model, 4 samples on 8 GPUs."""
    model, hardware = find_model("megatron-22b"), find_hardware("a100-80gb")
    hardware = hardware.model_copy(update={"constants": constants})
    found: list[float] = []
    for layer in layers:
        settings = {"model": model, "hardware": hardware, "gpus": 8, "tp": 8, "microbatch": 4, "batch": 4, "seq": 2048}
        asked = read_row(
            {**settings, "dtype": "fp16", "sequence_parallel": layer["sequence_parallel"], "recompute": "selective"}
        )
        block = distinct_blocks(model, hardware, Table.from_strategies([asked.strategy])).dense
        forward = float((block.forward + block.tp_forward + block.cp_forward + block.ep)[0])
        waits = block.tp_backward + block.cp_backward + block.ep
        backward = float((block.backward_input + block.backward_weight + waits)[0])
        backward += {"none": 0.0, "selective": float(block.selective[0]), "full": forward}[layer["recompute"]]
        found += [np.log(forward * 1e3 / layer["forward"]), np.log(backward * 1e3 / layer["backward"])]
    return np.array(found)


def fit_efficiency(rows: list[dict[str, Any]]) -> float:
    """Return the efficiency of their GPU at which these runs are right on average (of logarithms)."""
    hardware = find_hardware(rows[0]["hardware"])
    low, high = 0.2, 1.3
    for _ in range(20):
        middle = (low + high) / 2
        own = hardware.model_copy(update={"efficiency": middle})
        slow = step_errors([{**row, "hardware": own} for row in rows], CONSTANTS).mean() > 0
        low, high = (middle, high) if slow else (low, middle)
    return round((low + high) / 2, 3)


def minimise(loss: Callable[[Vector], float], start: Vector, steps: int = 600) -> Vector:
    """Return the minimum of a function, by Nelder and Mead's simplex."""
    corners = [start, *(start + 0.15 * axis for axis in np.eye(len(start)))]
    values = [loss(corner) for corner in corners]
    for _ in range(steps):
        order = np.argsort(values)
        corners, values = [corners[i] for i in order], [values[i] for i in order]
        if values[-1] - values[0] < 1e-9:
            break
        centre = np.mean(corners[:-1], axis=0)
        best, second, worst = values[0], values[-2], values[-1]
        new, value = _try(loss, centre, corners[-1], 1.0)
        if value < best:
            further, at_further = _try(loss, centre, corners[-1], 2.0)
            new, value = (further, at_further) if at_further < value else (new, value)
        elif value >= second:
            new, value = _try(loss, centre, corners[-1], -0.5)
        if value < worst:
            corners[-1], values[-1] = new, value
        else:
            corners = [corners[0], *((corners[0] + corner) / 2 for corner in corners[1:])]
            values = [values[0], *(loss(corner) for corner in corners[1:])]
    return corners[int(np.argmin(values))]


def _try(loss: Callable[[Vector], float], centre: Vector, worst: Vector, by: float) -> tuple[Vector, float]:
    point = centre + by * (centre - worst)
    return point, loss(point)


def _constants(values: Vector) -> Constants:
    return Constants(**dict(zip(Constants.model_fields, values.tolist(), strict=True)))


def _shown(constants: Constants) -> str:
    return "  ".join(f"{name}={value:.4g}" for name, value in constants)


if __name__ == "__main__":
    sys.exit(main())
