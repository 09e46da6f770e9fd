"""The same faults in a pipeline that is written by hand with torch.distributed: what its ranks say, and how soon.

rank 0   forward ─ isend ─▶ …        4 microbatches, all forwards, then all backwards, an all-reduce of the norm
rank 1   irecv ─ forward ─ isend     gloo, with a timeout of 6 s where torch's own is 30 minutes
rank 2   irecv ─ forward, loss ─ backward ─ isend …
"""

import multiprocessing
import os
import re
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from tests.runtime.faults.injection import ENDS, SKIPS, STALLS, WRONGS, Injection, Kind, Phase
from tests.runtime.faults.judged import Judged
from tests.runtime.ranks import PRELOADED

TIMEOUT_S, RANKS, STEPS, MICROBATCHES, WIDTH = 6.0, 3, 4, 4, 16
PLACES: tuple[Phase, ...] = ("warm-up", "cool-down", "reduction", "optimizer")


def judge_plain() -> list[Judged]:
    """Run each kind of fault on some ranks in some phases; return what was said of it."""
    cases: list[Injection] = []
    for number, kind in enumerate((*ENDS, *STALLS, *SKIPS, *WRONGS)):
        places = PLACES if kind in (*ENDS, *STALLS) else PLACES[:2]
        is_message = kind not in (*ENDS, *STALLS)  # the rank in the middle sends and receives in both
        ranks = [1 if is_message else (number + nth) % RANKS for nth in range(len(places))]
        cases += [Injection(kind, rank, phase) for rank, phase in zip(ranks, places, strict=True)]
    return list(map(_judged, cases))


def _judged(injection: Injection) -> Judged:
    with tempfile.TemporaryDirectory() as name:
        return _run(injection, Path(name))


def _run(injection: Injection, folder: Path) -> Judged:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ranks = [context.Process(target=_rank, args=(rank, injection, str(folder))) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    until = time.monotonic() + 4 * TIMEOUT_S
    for process in ranks:
        if process is not ranks[injection.rank]:
            process.join(max(until - time.monotonic(), 0.1))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
        process.join()
    said = {rank: path for rank in range(RANKS) if (path := folder / f"said{rank}").exists() and rank != injection.rank}
    words = "\n".join(path.read_text() for path in said.values())
    named = {int(rank) for rank in re.findall(r"\brank (\d)", words)}
    fired = float((folder / "fired").read_text()) if (folder / "fired").exists() else None
    ends = [path.stat().st_mtime for path in said.values()]
    aborted = [code for rank, code in enumerate(codes) if code not in (0, 1, None) and rank != injection.rank]
    return Judged(
        injection,
        named=named == {injection.rank},
        placed=False,
        wrong=bool(named - {injection.rank}),
        silent=not said and not aborted and injection.kind not in (*ENDS, *STALLS),
        told_s=min(ends) - fired if ends and fired is not None else None,
        left=0,
        code=max((abs(code) for code in codes if code is not None), default=None),
        said=words,
    )


def _rank(rank: int, injection: Injection, folder: str) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    where = Path(folder)
    dist.init_process_group(
        "gloo",
        store=FileStore(str(where / "store"), RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    try:
        _train(rank, injection, where)
    except RuntimeError as error:
        (where / f"said{rank}").write_text(str(error))
        os._exit(1)
    os._exit(0)


def _train(rank: int, injection: Injection, folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.manual_seed(0)
    stage = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)

    def at(phase: Phase, step: int, unit: int = 1) -> Kind | None:
        is_mine = rank == injection.rank and phase == injection.phase and step == 2 and unit == 1
        if is_mine and injection.kind in (*ENDS, *STALLS):
            injection.fire(folder)
        if is_mine and injection.kind in (*SKIPS, *WRONGS):
            (folder / "fired").write_text(str(time.time()))
            return injection.kind
        return None

    def send(tensor: torch.Tensor, peer: int, tag: int, kind: Kind | None) -> dist.Work | None:
        if kind == "skip_send":
            return None
        changed = injection._tamper(tensor) if kind in WRONGS else tensor
        return dist.isend(changed.contiguous(), peer, tag=tag + 4096 * (kind == "other"))

    def receive(peer: int, tag: int, kind: Kind | None) -> torch.Tensor:
        buffer = torch.zeros(2, WIDTH)
        if kind != "skip_recv":
            work = dist.irecv(buffer, peer, tag=tag)
            assert work is not None
            work.wait()
        return buffer

    for step in range(STEPS):
        kept, works = [], []
        for unit in range(MICROBATCHES):
            kind = at("warm-up", step, unit)
            given = receive(rank - 1, unit, kind) if rank else torch.randn(2, WIDTH)
            given.requires_grad_()
            made = stage(given)
            kept.append((given, made))
            works += [send(made.detach(), rank + 1, unit, kind)] if rank < RANKS - 1 else []
        for unit, (given, made) in enumerate(kept):
            kind = at("cool-down", step, unit)
            gradient = receive(rank + 1, 8 + unit, kind) if rank < RANKS - 1 else torch.ones_like(made)
            made.backward(gradient)
            assert given.grad is not None
            works += [send(given.grad, rank - 1, 8 + unit, kind)] if rank else []
        at("reduction", step)
        norm = sum(p.grad.square().sum() for p in stage.parameters() if p.grad is not None)
        assert isinstance(norm, torch.Tensor)
        dist.all_reduce(norm)
        for work in works:
            if work is not None:
                work.wait()
        at("optimizer", step)
        optimizer.step()
        optimizer.zero_grad()
