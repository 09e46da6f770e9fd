"""One rank of a world of four that trains models which PyTorch has sharded, one case after the other, over gloo.

torchrun --nproc-per-node 4 -m tests.runtime.blocks.dtensor_worker FOLDER

What the ranks end with lies in FOLDER, a file per rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import quintsched as qs
from quintsched.errors import MisfitError
from quintsched.runtime.blocks.block_builders import build_block
from quintsched.runtime.comm import connect
from quintsched.runtime.engine import Engine
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ..toys import ids_task, sgd, share, tiny_gpt

CLIP = 0.05
"""Under the norms of all steps, so that a norm that is not the whole model's shows in the weights."""

TASK = ids_task(2, 8, 8)

Shards = Callable[[list[nn.Module], DeviceMesh], None]


def cut_mlps(blocks: list[nn.Module], mesh: DeviceMesh) -> None:
    """Cut the MLPs of two blocks over tp; the third block is left to the engine."""
    for block in blocks[1:3]:
        parallelize_module(block, mesh["tp"], {"mlp.fc1": ColwiseParallel(), "mlp.fc2": RowwiseParallel()})


def cut_sequences(blocks: list[nn.Module], mesh: DeviceMesh) -> None:
    """Cut MLPs over tp, and the norm before them along the sequence: its gradients are partial sums."""
    for block in blocks[1:3]:
        split = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False)
        parallelize_module(block, mesh["tp"], {"norm2": split})
        up = ColwiseParallel(input_layouts=Shard(1))
        parallelize_module(
            block, mesh["tp"], {"norm2": SequenceParallel(), "mlp.fc1": up, "mlp.fc2": RowwiseParallel()}
        )


def shard_fully(blocks: list[nn.Module], mesh: DeviceMesh) -> None:
    """Shard the embedding, a block in two pieces, a block in one, and the head; the third block is left as it is."""
    replicas = mesh["dp" if "dp" in (mesh.mesh_dim_names or ()) else "ep"]
    fully_shard(blocks[1].norm2, mesh=replicas)
    for block in (*blocks[:3], blocks[-1]):
        fully_shard(block, mesh=replicas)


def shard_over_pp(blocks: list[nn.Module], mesh: DeviceMesh) -> None:
    """Shard over ranks that do not hold the same stages."""
    for block in blocks:
        fully_shard(block, mesh=mesh["pp"])


def keep_dtensors(blocks: list[nn.Module], mesh: DeviceMesh) -> None:
    """Let a block give its output as a DTensor."""
    parallelize_module(blocks[-1], mesh["tp"], {"head": ColwiseParallel(use_local_output=False)})


@dataclass(frozen=True)
class Case:
    mesh: str
    shard: Shards
    schedule: str = "1f1b"
    recompute: int = 0
    chunks: int | None = None
    dtype: torch.dtype = torch.float64
    zero: int = 0
    refusal: str = ""


CASES = {
    "tensor": Case("pp=2,tp=2", cut_mlps),
    "tensor, halves": Case("pp=2,tp=2", cut_mlps, "zb-h1"),
    "tensor, recomputed": Case("pp=2,tp=2", cut_mlps, recompute=1),
    "tensor, interleaved": Case("pp=2,tp=2", cut_mlps, "interleaved-1f1b", chunks=2),
    "sequence, replicas": Case("tp=2,dp=2", cut_sequences),
    "fully": Case("dp=2,pp=2", shard_fully),
    "fully, halves": Case("dp=2,pp=2", shard_fully, "zb-h1"),
    "fully, recomputed": Case("dp=2,pp=2", shard_fully, recompute=1),
    "fully, interleaved": Case("pp=2,dp=2", shard_fully, "interleaved-1f1b", chunks=2),
    "fully, uneven": Case("dp=4", shard_fully),
    "fully, short": Case("dp=2,pp=2", shard_fully, dtype=torch.bfloat16),
    "fully, tensor": Case("dp=2,tp=2", shard_fully),
    "fully, over ep": Case("pp=2,ep=2", shard_fully),
    "other ranks": Case("dp=2,pp=2", shard_over_pp, refusal="but fully_shard has to be over dp x cp x ep"),
    "twice": Case("dp=4", shard_fully, zero=2, refusal="whose weights ZeRO-2 cannot share out"),
    "output": Case("pp=2,tp=2", keep_dtensors, refusal="returns a DTensor"),
}


def plan_of(case: Case) -> qs.Plan:
    axes = qs.Mesh.parse(case.mesh)
    microbatches = 8 // axes.axis_size("dp") // axes.axis_size("ep") // axes.axis_size("tp")
    return qs.compile(
        case.schedule,
        mesh=axes,
        microbatches=microbatches,
        chunks=case.chunks,
        recompute=case.recompute,
        zero=case.zero,
    )


def train(case: Case) -> dict[str, object]:
    """Train two steps; between them evaluate, go astray, evaluate again and return to the state after the first."""
    plan = plan_of(case)
    names, sizes = zip(*plan.mesh.axes, strict=True)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    blocks = [build_block(block, number, 0, case.dtype) for number, block in enumerate(tiny_gpt(depth=3))]
    case.shard(blocks, mesh)
    transport = connect("gloo", timeout_s=60)
    engine = Engine(plan, blocks, cross_entropy_sum, sgd, clip=CLIP, dtype=case.dtype, transport=transport)
    first, second = (share(engine, *batch) for batch in zip(TASK.inputs, TASK.targets, strict=True))
    losses = [engine.step(*first).loss.item()]
    validation = engine.evaluate(*second).loss.item()
    state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    engine.step(*first)
    engine.evaluate(*first)
    engine.load_state_dict(state)
    losses.append(engine.step(*second).loss.item())
    assert abs(validation - losses[1]) < 1e-6, "weights that were evaluated are not those that were trained"
    held = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    found = {"losses": losses, "weights": engine.full_weights(), "held": held}
    transport.close()
    return found


def refuse(case: Case) -> dict[str, object]:
    try:
        train(case)
    except MisfitError as error:
        return {"refusal": str(error)}
    return {"refusal": ""}


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    found = {}
    for name, case in CASES.items():
        try:
            found[name] = refuse(case) if case.refusal else train(case)
        except Exception as error:
            error.add_note(f"in {name}")
            raise
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
