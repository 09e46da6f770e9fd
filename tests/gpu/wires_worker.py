"""One rank of a world that tries a part of what carries messages.

python -m tests.gpu.wires_worker nccl FOLDER PART          (started by `Machine.run`)
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import pytest
import torch

import quintsched as qs
from quintsched.runtime.comm import LocalTransport, LocalWorld, Transport, connect
from quintsched.runtime.comm.device import QUEUES, is_accelerator, synchronize
from tests.runtime.comm.group_checks import CHAIN, check_collectives, check_spelled, make_groups

from .machine import Backend
from .tiny_engines import STEPS, engine_of, require_same_bits, train
from .wire_checks import CHECKS, STREAM_CHECKS

TIMEOUT_S = 120


def try_transport(transport: Transport, folder: Path) -> None:
    """Collectives over groups of several shapes, and messages over directed channels."""
    groups = make_groups(transport)
    transport.open_channels(CHAIN)
    for group in groups:
        check_collectives(transport, group)
    for check in [*CHECKS, *(STREAM_CHECKS if is_accelerator(transport.device) else [])]:
        check(transport)
        synchronize(transport.device)
    leave_together(transport)


def try_spelled(transport: Transport, folder: Path) -> None:
    """Rings and trees beside the library's collectives."""
    check_spelled(transport, "ring", "tree")
    leave_together(transport)


def try_too_few_queues(transport: Transport, folder: Path) -> None:
    """Streams that would wait behind each other are refused."""
    with pytest.raises(qs.MisfitError, match=QUEUES):
        transport.open_channels([(0, 1), (1, 0)])


def try_communicators(transport: Transport, folder: Path) -> None:
    """All communicators are made before the first step, one for each group and directed channel, and none later."""
    plan = qs.compile("zb-h1", mesh="dp=2,pp=2", microbatches=4)
    engine = engine_of(transport, plan, torch.float32)
    before = made_communicators(folder)
    train(engine)
    assert before == made_communicators(folder), "a communicator was made in the middle of a step"
    expected = len(transport._links) + len(transport._groups)  # type: ignore[attr-defined]
    assert before == expected, f"{before} communicators for {expected} groups and channels of this rank"
    leave_together(transport)


def made_communicators(folder: Path) -> int:
    """Return how many communicators NCCL says that it has made in this process."""
    return (folder / f"nccl.{os.getpid()}").read_text().count("Init COMPLETE")


def try_bf16(transport: Transport, folder: Path) -> None:
    """Two stages in bf16 give the bits of one rank on the same device: masters and losses."""
    split, whole = (qs.compile("1f1b", mesh=mesh, microbatches=4) for mesh in ("pp=2", "pp=1"))
    alone = LocalTransport(LocalWorld(1, device=transport.device), 0)
    expected = train(engine_of(alone, whole, torch.bfloat16))
    require_same_bits(train(engine_of(transport, split, torch.bfloat16)), expected)
    leave_together(transport)


def try_trace(transport: Transport, folder: Path) -> None:
    """Leave a trace, which on a GPU is one of events."""
    plan = qs.compile("zb-h1", mesh="pp=2", microbatches=4)
    engine = engine_of(transport, plan, torch.float32, trace_steps=range(2, STEPS))
    train(engine)
    engine.save_trace(folder / "trace")
    leave_together(transport)


def leave_together(transport: Transport) -> None:
    """Wait for all ranks: a communicator must not end under one that is not through yet."""
    flag = torch.zeros(1, device=transport.device)
    transport.world_group().all_reduce(flag).wait()
    flag.item()


PARTS: Mapping[str, Callable[[Transport, Path], None]] = {
    "transport": try_transport,
    "spelled": try_spelled,
    "queues": try_too_few_queues,
    "communicators": try_communicators,
    "bf16": try_bf16,
    "trace": try_trace,
}


def main(backend: Backend, folder: Path, part: str) -> None:
    torch.set_num_threads(1)
    transport = connect(backend, timeout_s=TIMEOUT_S)
    assert (transport.name, transport.profile) == {"nccl": ("nccl", "channel"), "gloo": ("gloo", "tagged")}[backend]
    PARTS[part](transport, folder)
    transport.close()


if __name__ == "__main__":
    main(cast(Backend, sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
