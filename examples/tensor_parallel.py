"""Tensor parallelism on a plain model: `torchrun --nproc-per-node 2 examples/tensor_parallel.py`."""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn

from quintsched.runtime import apply_tensor_parallel


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(nn.functional.gelu(self.fc1(x)))


dist.init_process_group("gloo")
torch.manual_seed(0)  # the same weights and data on all ranks
whole = nn.Sequential(Mlp(64), Mlp(64), nn.Linear(64, 10))
cut = apply_tensor_parallel(deepcopy(whole), dist.group.WORLD)  # each rank has a shard of every fc1 and fc2
inputs, targets = torch.randn(32, 64), torch.randint(10, (32,))
for name, model in (("whole", whole), ("cut", cut)):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(5):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(f"{loss:.4f}")
    if dist.get_rank() == 0:
        print(f"{name:5}  {sum(weight.numel() for weight in model.parameters())} weights  losses {' '.join(losses)}")
dist.destroy_process_group()
