"""Reader of Galvatron's profiles: the time of layers, and the rates of a node's links.

    FOLDER/…/computation_profiling_bf16_llama2-7b_all.json    "layernum[4]_bsz8_seq2048": 149.65     ms of a forward
          …/memory_profiling_bf16_llama2-7b_all.json         {"layertype_0_sp": {"2048": {…}}}           MiB
          …/sp_time_1nodes_8gpus_per_node.json                "allreduce_size_8_64MB_time": 0.65     ms
          …/p2p_bandwidth_1nodes_8gpus_per_node.json          "pp_size_2": 163.671                   MB per ms

A forward of a whole model of so many layers is one measured step; its backward takes twice as long, as Galvatron's own
cost model has it. Galvatron's sizes are in MiB. It counts activations in 32 bits, the input of a layer ("checkpoint")
too; their ratio is read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quintsched.errors import InputError
from quintsched.files.user_records import read_json
from quintsched.strategies.descriptions.hardware import Curve
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.profiles.profile import Profile, ProfiledStep

LAYERS = "computation_profiling_*.json"
"""Names of files of layers' times, in a folder of any depth."""
MEMORY = "memory_profiling_*.json"
BACKWARD = 2.0
"""Time of a backward, in forwards."""
MIB = 2**20
MOST_BYTES = 2**24


def read_folder(folder: Path, model: Model) -> Profile:
    """Return the profile of a model in a folder; raises `InputError` for a broken file."""
    steps = [step for path in sorted(folder.rglob(LAYERS)) for step in _steps(path, model)]
    if not steps:
        raise InputError(f"{folder}: no times of layers: names like layernum[2]_bsz8_seq2048 are needed")
    sums, messages = dict[int, Curve](), dict[str, float]()
    for path in sorted(folder.rglob("sp_time_1nodes_*.json")):
        sums |= _all_reduces(_numbers(path))
    for path in sorted(folder.rglob("p2p_bandwidth_1nodes_*.json")):
        messages |= _numbers(path)
    rate = messages.get("pp_size_2")
    kept = {tp: ratio for path in sorted(folder.rglob(MEMORY)) for tp, ratio in _kept(path, steps[0].strategy.seq)}
    return Profile(
        name=f"Galvatron's profile of {model.name}",
        source=str(folder),
        steps=tuple(steps),
        kept=kept,
        collectives={"all_reduce": sums} if sums else {},
        message=None if rate is None else Curve(sizes=(MIB,), rates=(rate * MIB * 1e3,)),
    )


def _steps(path: Path, model: Model) -> Iterator[ProfiledStep]:
    dtype = next((one for one in ("fp16", "fp32") if f"_{one}_" in path.name), "bf16")
    for key, took_ms in _numbers(path).items():
        match = re.fullmatch(r"layernum\[(\d+)\]_bsz(\d+)_seq(\d+)", key)
        if match is None:
            continue  # differences of these
        layers, samples, seq = map(int, match.groups())
        cut = model.model_copy(update={"layers": layers, "seq": max(model.seq, seq)})
        sizes: dict[str, Any] = {"gpus": 1, "microbatch": samples, "batch": samples, "seq": seq, "dtype": dtype}
        yield ProfiledStep(model=cut, strategy=Strategy(**sizes), seconds={"block": took_ms / 1e3 * (1 + BACKWARD)})


def _kept(path: Path, seq: int) -> Iterator[tuple[int, float]]:
    """Yield tp and the activations that a layer keeps of a sample, in multiples of its input."""
    layers = _object(path).get("layertype_0_sp")
    found = layers.get(str(seq)) if isinstance(layers, dict) else None
    if found is None:
        return
    try:
        held = {str(tp): float(mib) for tp, mib in found["tp_activation_per_bsz_dict"].items()}
        yield from ((int(tp), mib / held["checkpoint"]) for tp, mib in held.items() if tp.isdigit())
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
        raise InputError(
            f"{path}: /layertype_0_sp/{seq}: activations by tp, and those of checkpoint, are needed"
        ) from None


def _all_reduces(times: Mapping[str, float]) -> dict[int, Curve]:
    """Return the rates of all-reduces by the number of ranks."""
    found: dict[int, dict[float, float]] = defaultdict(dict)
    for key, took_ms in times.items():
        match = re.fullmatch(r"allreduce_size_(\d+)_(\d+)MB_time", key)
        if match is not None:
            size = float(match[2]) * MIB
            found[int(match[1])][size] = size / (took_ms / 1e3)
    return {
        ranks: Curve(sizes=tuple(sorted(rates)), rates=tuple(rates[size] for size in sorted(rates)))
        for ranks, rates in found.items()
    }


def _numbers(path: Path) -> dict[str, float]:
    """Return the numbers of a file by name; raises `InputError`."""
    content = _object(path)
    for name, value in content.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise InputError(f"{path}: /{name}: a number above 0 is needed")
    return {name: float(value) for name, value in content.items()}


def _object(path: Path) -> dict[str, Any]:
    content = read_json(path, MOST_BYTES, "the profile")
    if not isinstance(content, dict):
        raise InputError(f"{path}: an object of numbers is needed")
    return content
