"""Test of predictions on this machine: does the strategy predicted to be fastest run fastest, of twelve?

    python benchmarks/predicted_steps.py [--rounds 8] [--hardware cpu.json] [--json]

    calibrate ──▶ description of this machine ──▶ predicted seconds ─┐
                                                                     ├─ Kendall's τ, and the cost of the choice
    2 to 8 gloo processes for each strategy ─────▶ measured seconds ─┘

All train the same GPT on the same batch, in processes that all exist from the beginning and are idle except those of
the strategy whose turn it is (see paired.py for why): two steps of each per round, the medians count. They are the one
that is predicted to be the fastest of all, as `tune` would choose it, and others with predicted times in even
steps, up to three times as long. The first is there twice ("A/A"), which shows the difference between equal strategies.
Targets: τ of at least 0.8, and the first takes at most 5 % longer than the fastest, beyond that noise.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from datetime import timedelta
from functools import partial
from itertools import product
from math import log
from multiprocessing.connection import Connection
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from paired import Interval, Target, median_interval
from prediction import kendall_tau

from quintsched.runtime import Engine, connect
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, gpt
from quintsched.runtime.train.built_in_losses import cross_entropy_sum
from quintsched.strategies.descriptions.hardware import Hardware
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.presets_and_files import find_hardware
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.descriptions.strategy_text import strategy_name
from quintsched.strategies.descriptions.strategy_validity import resolved
from quintsched.strategies.prediction.predict_one_strategy import predict
from quintsched.strategies.prediction.strategy_plans import plan_of

MODEL = Model(
    name="gpt", layers=8, hidden=256, heads=8, vocab=1024, seq=128, tied=False, dropout=False, attention="flash"
)
BATCH = 16
AGAIN = "again: "
NUMBER, SPREAD = 12, 3.0
"""Number of strategies, and the predicted time of the slowest relative to the fastest."""
STEPS = 2
"""Number of steps timed together, after one that is not."""
TIMEOUT_S = 120.0


def candidates() -> Iterator[Strategy]:
    """Yield strategies for 2, 4 and 8 ranks: meshes of all axes, microbatches, recomputation, ZeRO."""
    sizes = (1, 2, 4, 8)
    for dp, tp, pp, cp in product(sizes, repeat=4):
        ranks = dp * tp * pp * cp
        for microbatch, recompute, zero in product((1, 2, 4, 8, 16), ("none", "full"), (0, 3)):
            fits = BATCH % (dp * microbatch) == 0 and (zero == 0 or dp > 1)
            if 2 <= ranks <= 8 and fits:
                yield Strategy(
                    gpus=ranks,
                    dp=dp,
                    tp=tp,
                    pp=pp,
                    cp=cp,
                    microbatch=microbatch,
                    recompute=recompute,
                    zero=zero,
                    batch=BATCH,
                    seq=MODEL.seq,
                    dtype="fp32",
                )


def choose(hardware: Hardware) -> dict[str, tuple[Strategy, float]]:
    """Return strategies by name with their predicted seconds: the fastest of all, and others in even steps from it.

    Of each mesh, one at most.
    """
    predicted = sorted(((predict(MODEL, hardware, found).step_s, found) for found in candidates()), key=itemgetter(0))
    fastest, chosen = predicted[0][0], {}
    meshes: set[tuple[int, ...]] = set()
    for number in range(NUMBER):
        wanted = fastest * SPREAD ** (number / (NUMBER - 1))
        others = [row for row in predicted if _mesh(row[1]) not in meshes] if number else predicted[:1]
        seconds, strategy = min(others, key=lambda row: abs(log(row[0] / wanted)))
        meshes.add(_mesh(strategy))
        chosen[strategy_name(resolved(strategy))] = (strategy, seconds)
    return chosen


def _mesh(strategy: Strategy) -> tuple[int, ...]:
    return strategy.dp, strategy.tp, strategy.pp, strategy.cp


def engine_of(strategy: Strategy) -> Engine:
    """Return this rank's engine."""
    options = GPTOptions(hidden=MODEL.hidden, depth=MODEL.layers, heads=MODEL.heads)
    return Engine(
        plan_of(MODEL, strategy),
        gpt(DataSpec(input_shape=(MODEL.seq,), num_classes=MODEL.vocab), options),
        cross_entropy_sum,
        partial(torch.optim.AdamW, lr=1e-4, foreach=True),
        transport=connect("gloo", TIMEOUT_S),
    )


def serve(strategy: Strategy, rank: int, folder: str, pipe: Connection) -> None:
    """Run one rank of a strategy: make steps on request, and return their begin and end."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout=timeout, rank=rank, world_size=strategy.gpus)
    engine = engine_of(strategy)
    torch.manual_seed(engine.replica)
    ids = torch.randint(0, MODEL.vocab, (BATCH // strategy.replicas, MODEL.seq + 1))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    pipe.send(None)
    while pipe.recv():
        engine.step(inputs, targets).loss.item()  # brings back memory and caches after idling
        engine.everyone.barrier()
        begun, worked = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            engine.step(inputs, targets).loss.item()
        pipe.send((begun, time.perf_counter(), time.process_time() - worked))


@contextmanager
def ranks_of(name: str, strategy: Strategy) -> Iterator[list[Connection]]:
    """Start the ranks of a strategy, and end them with the context."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["quintsched.runtime.engine"])  # importing it takes each process seconds
    pipes, processes = [], []
    with TemporaryDirectory() as folder:
        try:
            for rank in range(strategy.gpus):
                ours, its = context.Pipe()
                process = context.Process(target=serve, args=(strategy, rank, folder, its), daemon=True)
                process.start()
                pipes.append(ours)
                processes.append(process)
            for pipe in pipes:
                _receive(pipe, name)
            yield pipes
        finally:
            for process in processes:
                process.kill()
                process.join()


def step_s(pipes: Sequence[Connection], name: str) -> tuple[float, float]:
    """Request steps from the ranks of a strategy; return the seconds of one, and the CPU seconds of all ranks."""
    for pipe in pipes:
        pipe.send(True)
    begun, ended, worked = zip(*(_receive(pipe, name) for pipe in pipes), strict=True)
    return (max(ended) - min(begun)) / STEPS, sum(worked) / STEPS


def _receive(pipe: Connection, name: str) -> Any:
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError(f"{name}: a rank has not answered for {TIMEOUT_S:g} s")
    return pipe.recv()


def measure(chosen: Mapping[str, Strategy], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of each strategy's steps, and of its cores, without a first round that warms up."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
    names = list(chosen)
    with ExitStack() as stack:
        ranks = {name: stack.enter_context(ranks_of(name, strategy)) for name, strategy in chosen.items()}
        for number in range(rounds + 1):
            for name in [*names[number % len(names) :], *names[: number % len(names)]]:
                samples[name].append(step_s(ranks[name], name))
    return {name: found[1:] for name, found in samples.items()}


def judge(predicted: Mapping[str, float], measured: Mapping[str, float], twice: Interval) -> list[Target]:
    """Return the targets."""
    tau = kendall_tau(list(predicted.values()), [measured[name] for name in predicted])
    choice, fastest = min(predicted, key=predicted.__getitem__), min(predicted, key=measured.__getitem__)
    noise = max(abs(twice.high - 1), abs(twice.low - 1))
    return [
        Target("1 - Kendall's τ", 1 - tau, 0.2),
        Target(f"{choice} / {fastest}, less noise", measured[choice] / measured[fastest] - noise, 1.05),
    ]


def table(predicted: Mapping[str, float], samples: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, float]:
    """Print predicted and measured times; return the measured ones."""
    measured = {name: statistics.median(wall for wall, _ in found) for name, found in samples.items()}
    print(f"  {'':<44}{'predicted ms':>14}{'measured ms':>14}{'ratio':>8}{'work ms':>10}")
    for name in sorted(predicted, key=measured.__getitem__):
        work = statistics.median(work for _, work in samples[name])
        mine, its = 1e3 * predicted[name], 1e3 * measured[name]
        print(f"  {name:<44}{mine:14.1f}{its:14.1f}{mine / its:8.3f}{1e3 * work:10.1f}")
    return measured


def main() -> int:
    """Predict, measure, print, and return whether a target was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8, choices=range(6, 101), metavar="N", help="6 to 100")
    parser.add_argument("--hardware", type=Path, help="a description by quintsched calibrate; default: made here")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with redirect_stdout(sys.stderr if arguments.json else sys.stdout):
        hardware = find_hardware(arguments.hardware) if arguments.hardware else calibrated()
        chosen = choose(hardware)
        predicted = {name: seconds for name, (_, seconds) in chosen.items()}
        strategies = {name: strategy for name, (strategy, _) in chosen.items()}
        fastest = next(iter(strategies))
        samples = measure({**strategies, AGAIN + fastest: strategies[fastest]}, arguments.rounds)
        measured = table(predicted, samples)
        pairs = zip(samples[fastest], samples[AGAIN + fastest], strict=True)
        twice = median_interval([b[0] / a[0] for a, b in pairs])
        print(f"  A/A: {twice}")
        targets = judge(predicted, measured, twice)
        print(*targets, sep="\n")
    if arguments.json:
        rows = {name: {"predicted_s": predicted[name], "measured_s": measured[name]} for name in predicted}
        print(json.dumps({"rows": rows, "targets": [vars(target) for target in targets]}, indent=1))
    return int(any(target.figure > target.limit for target in targets))


def calibrated() -> Hardware:
    """Measure this machine."""
    from quintsched.runtime.calibrate.machine_description import calibrate

    with TemporaryDirectory() as folder:
        return calibrate(torch.device("cpu"), Path(folder) / "measured.json")


if __name__ == "__main__":
    sys.exit(main())
