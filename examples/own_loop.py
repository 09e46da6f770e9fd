"""User-defined blocks, loss, optimizer and loop on a plan: two pipelines of two stages, or the same in one process.

torchrun --nproc-per-node 4 examples/own_loop.py
python examples/own_loop.py
"""

import os
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn

import quintsched as qs
from quintsched.runtime import Engine


class Residual(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


mesh, microbatches = ("dp=2,pp=2", 4) if "RANK" in os.environ else ("dp=1", 8)  # of 8 samples each, either way
plan = qs.compile("1f1b", mesh=mesh, microbatches=microbatches)
blocks = [partial(nn.Linear, 64, 128), *[partial(Residual, 128)] * 4, partial(nn.Linear, 128, 10)]
engine = Engine(plan, blocks, nn.CrossEntropyLoss(), optimizer=partial(torch.optim.AdamW, lr=1e-3))
images, digits = map(torch.tensor, load_digits(return_X_y=True))
for step in range(101):
    batch = torch.randperm(len(images), generator=torch.Generator().manual_seed(step))[:64]
    share = batch.chunk(engine.num_replicas)[engine.replica]  # the same on all ranks of a replica
    result = engine.step(images[share].float() / 16, digits[share])
    if step % 20 == 0 and engine.transport.rank == 0:
        print(f"step {step:3}  loss {result.loss:.4f}  gradient norm {result.grad_norm:.3f}")
engine.close()
