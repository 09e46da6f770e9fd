"""Time of searches on one core: exhaustive, pruned, and with a certificate of the pruned part.

    python benchmarks/search.py             about a minute
    python benchmarks/search.py --quick     without the exhaustive search

A trillion parameters on 16,384 A100s, where Calculon enumerates 7,359,840 executions (`calculon` counts them as
`llm/optimal_execution.py` of github.com/calculon-ai/calculon does, with a second tier of memory). They are 1,113 ways
to cut the work, each with up to 7,296 settings of switches: recomputation, sharding of the optimizer, the reduction
of tensor parallelism, whether its and the replicas' communication is hidden, offload to the second tier of
memory, and the network, one of two, of each axis. Here the same cuts, context parallelism besides, are searched
with as many settings of our switches: ZeRO 0 to 3, any number of recomputed layers, hidden reductions, sequence
parallelism, four schedules with closed forms. Networks follow from the mesh here, tensor parallelism hides what it can,
and there is no second tier.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from math import prod
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from quintsched.strategies.descriptions.presets_and_files import find_hardware, find_model
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.descriptions.strategy_text import duration, strategy_name
from quintsched.strategies.prediction.predict_one_strategy import predict
from quintsched.strategies.tuning.check_search_certificate import check_certificate
from quintsched.strategies.tuning.search_certificate import load_certificate, make_certificate
from quintsched.strategies.tuning.strategy_space import divisors
from quintsched.strategies.tuning.tune import Tuning, tune

GPUS, BATCH, SEQ = 16_384, 16_384, 2048
LAYERS, HIDDEN, HEADS = 128, 25_600, 160
AS_MANY = {
    "schedule": ("1f1b", "interleaved-1f1b", "zb-h1", "gpipe"),
    "recompute": ("none", "selective", "full", *range(1, LAYERS)),
    "overlap": (False, True),
}
"""Settings of our switches, as many as Calculon has; all else is free."""
USERS = (
    ("gpt3-175b", "a100-80gb", 1024, 1536, 2048),
    ("mixtral-8x7b", "h100", 256, 1024, 4096),
    ("deepseek-v3", "h100", 2048, 15_360, 4096),
)


def calculon() -> int:
    """Return the number of executions that Calculon enumerates for the same model and GPUs."""
    return sum(
        _microbatches(tp, dp) * _switches(tp, pp, dp) * len(divisors(LAYERS // pp) if pp > 1 else [1])
        for tp in divisors(GPUS)
        if HIDDEN % tp == 0 and HEADS % tp == 0
        for pp in divisors(min(GPUS // tp, LAYERS))
        if GPUS % (tp * pp) == 0 and LAYERS % pp == 0
        for dp in [GPUS // (tp * pp)]
        if dp <= BATCH
    )


def _microbatches(tp: int, dp: int) -> int:
    return sum(size * SEQ % tp == 0 for size in divisors(BATCH // dp))


def _switches(tp: int, pp: int, dp: int) -> int:
    recomputed = 3 + 2 * 2 * (1 + 1 + 2)  # full; else activations may be offloaded, and a gather may be done again
    parallel = (dp > 1, dp > 1, pp > 1, tp > 1, dp > 1)  # sharded, hidden, and two networks for each axis
    return recomputed * prod(2 if there else 1 for there in parallel) * (3 if tp > 1 else 1) * 2 * 2


def measured(what: str, tuning: Tuning, began: float) -> None:
    best = tuning.best[0]
    size = f"{tuning.strategies:,}" if tuning.strategies < 1e9 else f"{tuning.strategies:.1e}"
    print(f"{what:<52}{size:>12} strategies {tuning.evaluated:>11,} evaluated {time.process_time() - began:8.2f} s")
    print(f"    {duration(best.step_s)}: {strategy_name(best.strategy)}", flush=True)


def as_large_as_calculons(quick: bool) -> None:
    model, hardware = find_model("gpt-1t"), find_hardware("a100-80gb")
    print(f"Calculon's executions: {calculon():,}")
    found = []
    for prune in (True,) if quick else (True, False):
        began = time.process_time()
        found.append(tune(model, hardware, GPUS, BATCH, SEQ, fixed=AS_MANY, top=1, front=False, prune=prune))
        measured("with pruning" if prune else "exhaustively", found[-1], began)
    assert found[0].strategies >= calculon()
    assert all(one.best == found[0].best for one in found), "the two searches disagree"


def with_certificate(name: str, hardware: str, gpus: int, batch: int, seq: int) -> None:
    began = time.process_time()
    tuning = tune(find_model(name), find_hardware(hardware), gpus, batch, seq, top=5, front=False)
    measured(f"{name} on {gpus:,} {hardware}, all axes free", tuning, began)
    with tempfile.TemporaryDirectory() as folder:
        path, began = Path(folder) / "certificate.json", time.process_time()
        make_certificate(tuning).save(path)
        written = time.process_time() - began
        given, began = load_certificate(path), time.process_time()
        check_certificate(given)
        print(
            f"    certificate: {len(given.pruned):,} boxes, {len(given.evaluated):,} frames, {path.stat().st_size:,} "
            f"bytes, written in {written:.2f} s, checked in {time.process_time() - began:.2f} s",
            flush=True,
        )


def thousand_rows() -> None:
    """Predict a thousand strategies one by one, as `quintsched predict --rows` does."""
    model, hardware, began = find_model("gpt3-175b"), find_hardware("a100-80gb"), time.process_time()
    for number in range(1000):
        batch, seq = 8 * (1 + number), 128 * (1 + number % 32)
        predict(model, hardware, Strategy(gpus=64, tp=8, pp=8, batch=batch, seq=seq, sequence_parallel=True))
    print(f"a thousand predictions: {time.process_time() - began:.2f} s", flush=True)


def main() -> None:
    print(f"seconds of one core of {platform.machine()}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    thousand_rows()
    as_large_as_calculons("--quick" in sys.argv)
    with_certificate("gpt-1t", "a100-80gb", GPUS, BATCH, SEQ)
    for case in USERS:
        with_certificate(*case)


if __name__ == "__main__":
    main()
