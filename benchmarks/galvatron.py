"""Search of Galvatron beside `tune`: Llama-2 7B on 8 A100, by the profile that Galvatron ships with it.

    python benchmarks/galvatron.py DIR [--memory 36] [--batch 16] [--seconds 1800]

DIR is a copy of PKU-DAIR/Hetu-Galvatron in which `csrc/dp_core.cpp` has been built. Its own search runs in a process of
its own. Both strategies are then timed by one cost model: ours, with the rates of that profile. Exit code 1 if `tune`
needs over a tenth of Galvatron's processor time, or finds a slower strategy than Galvatron does, or than it ships.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quintsched.errors import UsageError
from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.presets_and_files import find_hardware, find_model
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.descriptions.strategy_text import strategy_name
from quintsched.strategies.prediction.predict_one_strategy import predict
from quintsched.strategies.prediction.profiled.measured_hardware import measured_hardware
from quintsched.strategies.profiles.read_profile import Measured, read_profile
from quintsched.strategies.tuning.tune import tune

MODEL, SEQ, GPUS = find_model("llama-2-7b"), 2048, 8
SHIPPED = Path(__file__).parent / "data" / "galvatron_llama2_7b.json"
CHOSEN = "galvatron_config_llama2-7b_1nodes_8gpus_per_node_36GB_bf16.json"
ENOUGH = 10.0

SEARCH = """
import os, sys, types
folder, memory, batch, output = sys.argv[1:]
sys.path.insert(0, folder)
runtime = types.ModuleType("galvatron.core.runtime")  # of which the search reads types of arguments alone
runtime.__path__ = [os.path.join(folder, "galvatron", "core", "runtime")]
sys.modules[runtime.__name__] = runtime
from galvatron.core.search_engine.args_schema import GalvatronSearchArgs
from galvatron.core.search_engine.search_engine import GalvatronSearchEngine
arguments = GalvatronSearchArgs.model_validate({
    "model_info": {"hidden_size": 4096, "num_layers": 32, "vocab_size": 32000},
    "hardware_info": {"num_nodes": 1, "num_gpus_per_node": 8, "memory_constraint": int(memory)},
    "batch_size_info": {"settle_bsz": int(batch), "min_bsz": int(batch), "max_bsz": int(batch)},
    "profiling_info": {"time_profile_mode": "static", "memory_profile_mode": "static"},
    "common_train_info": {"seq_length": 2048, "sequence_parallel": True},
    "parallelism_info": {"default_dp_type": "zero2", "pipeline_type": "pipedream_flush", "mixed_precision": "bf16"},
    "options_info": {"output_config_path": output, "log_dir": output},
})
engine = GalvatronSearchEngine(arguments)
layers = [{"hidden_size": 4096, "layer_num": 32, "seq_len": 2048}]
engine.set_search_engine_info(os.path.join(folder, "galvatron", "models", "gpt"), layers, "llama2-7b")
engine.initialize_search_engine()
engine.parallelism_optimization()
"""
"""Program that runs Galvatron's search, as its `search_dist.py` does."""


def search(folder: Path, memory: int, batch: int, seconds: float) -> tuple[dict[str, Any] | None, float]:
    """Return the strategy of Galvatron's search (None: it had not ended in time), and its processor time."""
    with tempfile.TemporaryDirectory() as output:
        words = [sys.executable, "-c", SEARCH, str(folder.resolve()), str(memory), str(batch), output]
        began = _children_s()
        try:
            subprocess.run(words, cwd=output, check=True, timeout=seconds, stdout=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            return None, _children_s() - began
        found = sorted(Path(output).rglob("galvatron_config_*.json"))
        return (json.loads(found[0].read_text(encoding="utf-8")) if found else None), _children_s() - began


def _children_s() -> float:
    from resource import RUSAGE_CHILDREN, getrusage

    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def strategy_of(chosen: Mapping[str, Any]) -> Strategy:
    """Return a strategy of Galvatron's as one of ours; raises `UsageError` where its layers differ in more than that.

    Of layers that differ in recomputation, as many are recomputed. Ulysses' sequence parallelism is none of ours.
    """
    each = {name: [int(one) for one in chosen[name].split(",")] for name in ("tp_sizes_enc", "dp_types_enc", "use_sp")}
    if any(len(set(values)) > 1 for values in each.values()) or each["use_sp"][0]:
        raise UsageError(f"layers of this strategy have no one mesh: {chosen}")
    tp, pp, batch = each["tp_sizes_enc"][0], int(chosen["pp_deg"]), int(chosen["global_bsz"])
    dp, again = GPUS // tp // pp, [int(one) for one in chosen["checkpoint"].split(",")]
    cut = [int(one) for one in chosen["pp_division"].split(",")]
    firsts = [sum(cut[:stage]) for stage in range(pp)]
    return Strategy(
        gpus=GPUS,
        dp=dp,
        tp=tp,
        pp=pp,
        batch=batch,
        microbatch=batch // dp // int(chosen["chunks"]),
        seq=SEQ,
        zero=3 if each["dp_types_enc"][0] else 2,
        stages=tuple(cut) if pp > 1 else None,
        recompute=tuple(sum(again[first : first + size]) for first, size in zip(firsts, cut, strict=True)),
        sequence_parallel=tp > 1,
    )


def profiled(memory: float) -> tuple[Hardware, dict[str, Any]]:
    """Return an A100 of so many GiB with the rates of the shipped profile, and the strategy that is shipped with it."""
    files = json.loads(SHIPPED.read_text(encoding="utf-8"))["files"]
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_text(json.dumps(content), encoding="utf-8")
        profile = read_profile(Path(folder), Measured(model=MODEL))
    base = find_hardware("a100-40gb").model_copy(update={"memory_gb": memory * 2**30 / 1e9})
    return measured_hardware(base, profile), files[CHOSEN]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--memory", type=int, default=36, help="GiB of a GPU")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1800.0)
    options = parser.parse_args()
    hardware, shipped = profiled(options.memory)
    began = time.process_time()
    ours = tune(MODEL, hardware, GPUS, options.batch, SEQ, top=1).best[0]
    ours_s = time.process_time() - began
    print(
        f"tune       {ours_s:9.2f} s of a core  {ours.step_s:.3f} s a step  {strategy_name(ours.strategy)}", flush=True
    )
    chosen, theirs_s = search(options.folder, options.memory, options.batch, options.seconds)
    print(f"Galvatron  {theirs_s:9.2f} s of a core  {chosen or 'no end yet'}", flush=True)
    missed = theirs_s < ENOUGH * ours_s
    for name, one in (("Galvatron's", chosen), ("shipped", shipped)):
        if one is not None and int(one["global_bsz"]) == options.batch:
            found = predict(MODEL, hardware, strategy_of(one))
            missed |= found.step_s < ours.step_s
            print(f"{name:11} {found.step_s:.3f} s a step  {strategy_name(found.strategy)}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
