"""Tensor and data parallelism beside PyTorch's own, on gloo, in one run.

    python benchmarks/parallel.py [--only tensor|data] [--rounds 40] [--json]

    tensor   a column layer, GELU and a row layer, forward and backward, beside `parallelize_module` with DTensors;
             with whole tokens, and with sharded tokens (sequence parallelism)
    data     a training step with gradients summed over two replicas, beside DistributedDataParallel (25 MB buckets,
             gradients as views of them, `no_sync` for all microbatches but the last), and beside the same with the
             engine's extra result: the whole batch's loss on every rank, one small all-reduce more

Ratios are paired round by round (see paired.py). All rivals start from the same weights, and before anything is timed
their results must agree.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from paired import Samples, Target, merge, ratios, report, run_processes, sample_warm
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import quintsched as qs
from quintsched.runtime import Engine, Group, apply_tensor_parallel, connect

TORCH, AGAIN, SHARED, OURS = "torch", "torch again", "torch, loss shared", "quintsched"
WARM_UP = 5
LIMIT = 1.0
"""Limit of the ratio's lower end: at least as fast as torch."""


class Pair(nn.Module):
    """Layers that tensor parallelism cuts: (samples, tokens, width) to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both layers, with a GELU between them."""
        out: Tensor = self.fc2(nn.functional.gelu(self.fc1(x)))
        return out


@dataclass(frozen=True)
class TensorCase:
    """A pair of layers on (samples, tokens, width)."""

    tokens: int
    width: int
    shares: bool
    steps: int

    @property
    def title(self) -> str:
        kind = "tokens shared out" if self.shares else "whole tokens"
        return f"column and row, {self.width} wide, 4 x {self.tokens} tokens, {kind}"


@dataclass(frozen=True)
class DataCase:
    """A training step of layers, each `width` wide."""

    width: int
    depth: int
    rows: int
    microbatches: int
    steps: int

    @property
    def title(self) -> str:
        return f"two replicas, {self.depth} layers {self.width} wide, {self.rows} rows, m={self.microbatches}"


TENSOR = [
    TensorCase(32, 64, False, 40),
    TensorCase(128, 256, False, 4),
    TensorCase(32, 64, True, 40),
    TensorCase(128, 256, True, 4),
]
DATA = [DataCase(64, 4, 32, 1, 20), DataCase(512, 6, 64, 1, 2), DataCase(512, 6, 64, 4, 1)]


def tensor_rival(case: TensorCase, name: str, group: Group) -> Callable[[], Tensor]:
    """Return a forward and backward on this rank, which returns the gradient of its input."""
    torch.manual_seed(0)
    layers, whole = Pair(case.width), torch.randn(4, case.tokens, case.width)
    mine = whole.chunk(2, 1)[group.index].contiguous() if case.shares else whole
    if name == OURS:
        model = apply_tensor_parallel(layers, group, sequence_parallel=case.shares)
    else:
        column = ColwiseParallel(input_layouts=Shard(1)) if case.shares else ColwiseParallel()
        row = RowwiseParallel(output_layouts=Shard(1)) if case.shares else RowwiseParallel()
        mesh = init_device_mesh("cpu", (2,))
        model = parallelize_module(layers, mesh, {"fc1": column, "fc2": row})

    def step() -> Tensor:
        x = mine.detach().requires_grad_()
        model(x).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None
        assert x.grad is not None
        return x.grad

    return step


def measure_tensor(rank: int, number: int, rounds: int) -> Samples:
    """Time one case of tensor parallelism on this rank."""
    case, transport = TENSOR[number], connect("gloo", 60)
    group = transport.make_group([(0, 1)])
    rivals = {name: tensor_rival(case, name, group) for name in (TORCH, AGAIN, OURS)}
    results = {name: step() for name, step in rivals.items()}
    torch.testing.assert_close(results[OURS], results[TORCH])
    return timed(rivals, rounds, case.steps, group)


def layers_of(case: DataCase) -> list[nn.Module]:
    """Return the layers with the weights that all rivals start from."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(case.width, case.width), nn.ReLU()) for _ in range(case.depth)]


def data_rival(case: DataCase, name: str, group: Group) -> Callable[[], Tensor]:
    """Return a training step on this rank, which returns the mean loss of the batch (torch: of the replica)."""
    torch.manual_seed(1 + group.index)
    inputs, targets = torch.randn(2, case.rows, case.width)
    if name == OURS:
        plan = qs.compile("gpipe", mesh=qs.Mesh(dp=2), microbatches=case.microbatches)
        transport = connect("gloo", 60)
        engine = Engine(plan, layers_of(case), summed_squares, sgd, transport=transport)
        return lambda: engine.step(inputs, targets).loss
    model = DistributedDataParallel(nn.Sequential(*layers_of(case)), gradient_as_bucket_view=True)
    optimizer = sgd(model.parameters())
    last = case.microbatches - 1
    tally = torch.zeros(2, dtype=torch.float64)

    def share(total: Tensor) -> Callable[[], object]:
        tally[0], tally[1] = total * case.rows, case.rows
        work = dist.all_reduce(tally, async_op=True)
        assert work is not None
        wait: Callable[[], object] = work.wait
        return wait

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        total = torch.zeros(())
        parts = zip(inputs.chunk(case.microbatches), targets.chunk(case.microbatches), strict=True)
        for number, (some_inputs, some_targets) in enumerate(parts):
            with nullcontext() if number == last else model.no_sync():
                loss = summed_squares(model(some_inputs), some_targets)[0] / case.rows
                loss.backward()
            total += loss.detach()
        wait = share(total) if name == SHARED else lambda: None
        optimizer.step()
        wait()
        return total

    return step


def summed_squares(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over the samples of their mean squared error, and their number."""
    return (output - targets).square().mean(1).sum(), torch.tensor(float(len(output)))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of all rivals."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, foreach=True)


def measure_data(rank: int, number: int, rounds: int) -> Samples:
    """Time one case of data parallelism on this rank."""
    case, transport = DATA[number], connect("gloo", 60)
    group = transport.make_group([(0, 1)])
    rivals = {name: data_rival(case, name, group) for name in (TORCH, AGAIN, SHARED, OURS)}
    for _ in range(3):
        losses = {name: step().to(torch.float64) for name, step in rivals.items()}
        mean = losses[TORCH].clone().reshape(1)
        group.all_reduce(mean).wait()
        torch.testing.assert_close(losses[OURS], mean[0] / 2, rtol=1e-4, atol=1e-5)
    return timed(rivals, rounds, case.steps, group)


def timed(rivals: Mapping[str, Callable[[], object]], rounds: int, steps: int, group: Group) -> Samples:
    """Warm up, and sample the rivals in turn."""
    flag = torch.zeros(1)
    return sample_warm(rivals, rounds, steps, lambda: group.all_reduce(flag).wait(), WARM_UP)


def compare(title: str, samples: Samples, steps: int) -> dict[str, Any]:
    """Report a case; its limit holds for the lower end of the engine's interval."""
    beside = [name for name in (TORCH, SHARED) if name in samples]
    targets = [Target(f"least time beside {name!r}", ratios(samples, OURS, name, 0).low, LIMIT) for name in beside]
    return report(title, samples, steps, TORCH, targets)


def main() -> int:
    """Run the requested parts, and return 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=("tensor", "data"))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    with redirect_stdout(sys.stderr if arguments.json else sys.stdout):
        kinds: list[tuple[str, Sequence[TensorCase | DataCase], Callable[[int, int, int], Samples]]] = [
            ("tensor", TENSOR, measure_tensor),
            ("data", DATA, measure_data),
        ]
        for kind, cases, work in kinds:
            for number, case in enumerate(cases):
                if arguments.only in (None, kind):
                    ranks = run_processes(work, 2, number, arguments.rounds, timeout_s=600)
                    figures[case.title] = compare(case.title, merge(ranks), case.steps)
    if arguments.json:
        print(json.dumps(figures, indent=1))
    targets = [target for figure in figures.values() for target in figure["targets"]]
    return int(any(target["figure"] > target["limit"] for target in targets))


if __name__ == "__main__":
    sys.exit(main())
