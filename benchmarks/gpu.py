"""GPU benchmarks, in one run: steps beside plain PyTorch, split backwards, ranks that share a GPU, memory, host time.

    python benchmarks/gpu.py [--only steps …] [--rounds 40] [--json] [--device cuda]

    steps        one rank, GPT of 350 M and Llama of 1 B in bf16: the step beside a plain loop's; tokens/s, MFU
    numbers      one rank: chunks and split backwards against that loop, the largest difference of any weight
    beside       two and four ranks beside torch.distributed.pipelining: 1F1B, interleaved, zero bubble
    bubbles      two ranks: bubbles of traces, and the step that a trace's costs predict
    halves       both halves of a backward against the whole
    memory       the peak of CUDA's allocator beside the simulator's, on one rank and on two
    host         the host's time for an instruction
    ring         ring attention's computation beside one fused call
    experts      number of device synchronizations, per mixture and microbatch
    predicted    12 steps and peaks of memory predicted from measurements of `calibrate` here, and their order

The same job: gradients accumulated over the microbatches in float32, divided by the batch's weight, their norm and the
finite check, AdamW on float32 masters, rounding to bf16. Ratios are paired round by round (see paired.py). Where a part
fails the others are measured all the same, and the run ends with 1. `--device cpu` tries the script itself, with tiny
sizes and over gloo.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

import torch
from gpu_parts.experts import experts
from gpu_parts.halves import halves
from gpu_parts.host import host
from gpu_parts.memory import memory
from gpu_parts.predicted import predicted
from gpu_parts.ranks import beside_torch, bubbles, rank_memory
from gpu_parts.ring import ring
from gpu_parts.sharing import nccl_version
from gpu_parts.steps import numbers, steps

Part = Callable[[torch.device, int], dict[str, Any]]

PARTS: Mapping[str, tuple[Part, ...]] = {
    "steps": (steps,),
    "numbers": (numbers,),
    "halves": (halves,),
    "memory": (memory, rank_memory),
    "host": (host,),
    "ring": (ring,),
    "experts": (experts,),
    "beside": (beside_torch,),
    "bubbles": (bubbles,),
    "predicted": (predicted,),
}


def run_parts(only: Sequence[str], device: torch.device, rounds: int) -> tuple[dict[str, Any], list[str]]:
    """Run parts; print tables, and return the figures by part, and the names of failed ones."""
    found: dict[str, Any] = {"machine": machine(device)}
    print(", ".join(f"{name} {value}" for name, value in found["machine"].items()))
    failed = []
    for name in only or PARTS:
        since = time.perf_counter()
        for part in PARTS[name]:
            try:
                found[name] = {**found.get(name, {}), **part(device, rounds)}
            except Exception:
                traceback.print_exc(file=sys.stdout)
                failed.append(name)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        print(f"  ({name}: {time.perf_counter() - since:.0f} s)", flush=True)
    return found, failed


def machine(device: torch.device) -> dict[str, str]:
    """Return the machine's device and library versions."""
    on_gpu = device.type == "cuda"
    found = {"device": torch.cuda.get_device_name() if on_gpu else platform.machine(), "torch": torch.__version__}
    return found | ({"nccl": ".".join(map(str, nccl_version()))} if on_gpu else {})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=PARTS, nargs="+", default=[], help="run some parts")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each comparison, at least 6 (default 40)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries the script itself")
    parser.add_argument(
        "--json", action="store_true", help="figures as JSON to standard output, tables to standard error"
    )
    chosen = parser.parse_args()
    if chosen.rounds < 6:
        parser.error("an interval of 95 % takes at least 6 rounds")
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing to measure (--device cpu tries the script itself)", file=sys.stderr)
        return 0
    with redirect_stdout(sys.stderr if chosen.json else sys.stdout):
        found, failed = run_parts(chosen.only, torch.device(chosen.device), chosen.rounds)
        if failed:
            print(f"\nfailed: {', '.join(failed)}")
    if chosen.json:
        print(json.dumps(found, indent=1))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
