"""One rank of a world that tries a part of what carries messages.

python -m tests.gpu.wires_worker nccl FOLDER PART          (started by `Machine.run`)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime import Engine
from quintsched.runtime.comm import LocalTransport, LocalWorld, Transport, connect
from quintsched.runtime.comm.device import QUEUES, is_accelerator, synchronize
from quintsched.runtime.train.built_in_losses import cross_entropy_sum
from tests.runtime.comm.group_checks import CHAIN, check_collectives, make_groups
from tests.runtime.comm.spelled_checks import check_spelled
from tests.runtime.toys import ids_task, share, tiny_gpt

from .machine import Backend
from .wire_checks import CHECKS, STREAM_CHECKS

TIMEOUT_S, STEPS, SAMPLES, LENGTH = 120, 5, 8, 16


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
    check_spelled(transport)
    leave_together(transport)


def try_too_few_queues(transport: Transport, folder: Path) -> None:
    """Streams that would wait behind each other are refused."""
    with pytest.raises(MisfitError, match=QUEUES):
        transport.open_channels([(0, 1), (1, 0)])


def try_communicators(transport: Transport, folder: Path) -> None:
    """All communicators are made before the first step, one for each group and directed channel, and none later."""
    plan = qs.compile("zb-h1", mesh="dp=2,pp=2", microbatches=4)
    engine = make_engine(plan, transport, torch.float32)
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
    device = transport.device
    split, whole = (
        qs.compile("1f1b", mesh=mesh, microbatches=4, chunks=chunks)
        for mesh, chunks in (("pp=2", None), ("pp=1", None))
    )
    with sdpa_kernel(SDPBackend.MATH):  # the faster kernels add up in an order that changes from run to run
        alone = make_engine(whole, LocalTransport(LocalWorld(1, device=device), 0), torch.bfloat16)
        expected_losses, expected = train(alone)
        losses, found = train(make_engine(split, transport, torch.bfloat16))
    assert losses == expected_losses, (losses, expected_losses)
    for name, weight in found.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, expected[name]), name
    leave_together(transport)


def try_trace(transport: Transport, folder: Path) -> None:
    """Leave a trace, which on a GPU is one of events."""
    plan = qs.compile("zb-h1", mesh="pp=2", microbatches=4)
    engine = make_engine(plan, transport, torch.float32, trace_steps=range(2, STEPS))
    train(engine)
    engine.save_trace(folder / "trace")
    leave_together(transport)


def make_engine(plan: qs.Plan, transport: Transport, dtype: torch.dtype, trace_steps: range | None = None) -> Engine:
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    return Engine(
        plan, tiny_gpt(LENGTH), cross_entropy_sum, optimizer, dtype=dtype, transport=transport, trace_steps=trace_steps
    )


def train(engine: Engine) -> tuple[list[float], Mapping[str, Tensor]]:
    """Do a few steps; return losses, and this rank's masters by name."""
    task = ids_task(STEPS, SAMPLES, LENGTH)
    batches = zip(task.inputs, task.targets, strict=True)
    losses = [engine.step(*share(engine, *batch)).loss.item() for batch in batches]
    stages = engine.stages.values()
    return losses, {
        name: engine.masters.master_of(p).detach() for stage in stages for name, p in stage.named_weights().items()
    }


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
