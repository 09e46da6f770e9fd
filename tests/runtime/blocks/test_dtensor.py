"""Modules that PyTorch has sharded train as stages to the numbers of one process: one launch of gloo processes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
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
from quintsched.runtime import Engine, connect
from quintsched.runtime.blocks.block_builders import build_block
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ..ranks import run_ranks
from ..toys import Outcome, ids_task, sgd, share, tiny_gpt, train_plainly, worst_difference

CLIP = 0.05
"""Under the norms of all steps, so that a norm that is not the whole model's shows in the weights."""

RANKS, TASK = 4, ids_task(2, 8, 8)

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
    options = {"chunks": case.chunks, "recompute": case.recompute, "zero": case.zero}
    return qs.compile(case.schedule, mesh=axes, microbatches=microbatches, **options)


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


def run_rank(folder: Path) -> None:
    dist.init_process_group("gloo")
    found = {}
    for name, case in CASES.items():
        try:
            found[name] = train(case)
        except Exception as error:
            error.add_note(f"in {name}")
            if not case.refusal or not isinstance(error, qs.MisfitError):
                raise
            found[name] = {"refusal": str(error)}
    torch.save(found, folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.processes
def test_they_train_to_the_numbers_of_one_process(tmp_path: Path) -> None:
    assert run_ranks(run_rank, RANKS, tmp_path, timeout_s=100) == [0] * RANKS
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    alone = train_plainly(TASK, tiny_gpt(depth=3), 4, clip=CLIP, dtype=torch.float64)
    for name, case in CASES.items():
        if case.refusal:
            assert all(case.refusal in rank[name].get("refusal", "") for rank in ranks), name
            continue
        held = [rank[name].pop("held") for rank in ranks]
        outcomes = [Outcome(**rank[name]) for rank in ranks]
        assert worst_difference(outcomes, alone) <= (1e-10 if case.dtype == torch.float64 else 2e-2), name
        sizes = qs.Mesh.parse(case.mesh)
        replicas = sizes.axis_size("dp") * sizes.axis_size("ep")
        shares = replicas if case.shard is shard_fully else sizes.axis_size("tp")
        master = torch.float64 if case.dtype == torch.float64 else torch.float32
        kept = {found["model.1.mlp.fc1.weight"] for found in held if "model.1.mlp.fc1.weight" in found}
        assert kept == {((64 // shares, 16), master)}, name
