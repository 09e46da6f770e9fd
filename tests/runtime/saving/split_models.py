"""Blocks that know what a library calls their tensors, and batches for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime.engine import Engine

WIDTH = 16


class Attention(nn.Module):
    """A fused product of queries, keys and values, which tp cuts in three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, WIDTH // 4
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        out: Tensor = self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        out: Tensor = x * self.scale * self.frozen + self.fc2(torch.relu(self.fc1(x)))
        return out


class Split(list[nn.Module]):
    """Blocks that know what a library calls their tensors."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__([nn.Linear(8, WIDTH), *(Layer() for _ in range(3)), nn.Linear(WIDTH, 4)])
        for number, block in enumerate(self):
            block.to(torch.float64)
            random = torch.Generator().manual_seed(number)
            for tensor in block.state_dict().values():
                tensor.copy_(torch.randn(tensor.shape, generator=random, dtype=torch.float64) / 4)
        self.config = {"model_type": "toy"}
        self.own_names: Mapping[str, str] = {
            f"{number}.{name}": prefix + self._own(number, name)
            for number, block in enumerate(self)
            for name in block.state_dict()
        }

    def _own(self, number: int, name: str) -> str:
        return {0: f"embed.{name}", len(self) - 1: f"head.{name}"}.get(number, f"layers.{number - 1}.{name}")


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return (output.flatten(1).mean(1) - targets).square().sum()


def batches(engine: Engine, steps: int = 2) -> Iterator[tuple[Tensor, Tensor]]:
    for inputs, targets in whole_batches(steps):
        mine = slice(engine.replica * 8 // engine.num_replicas, (engine.replica + 1) * 8 // engine.num_replicas)
        yield inputs[mine], targets[mine]


def whole_batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(9)
    return [
        tuple(torch.randn(*sizes, generator=random, dtype=torch.float64) for sizes in ((8, 5, 8), (8,)))
        for _ in range(steps)
    ]  # type: ignore[misc]


def plan_of(mesh: str, zero: int) -> qs.Plan:
    return qs.compile("1f1b", mesh=mesh, microbatches=2, zero=zero)
