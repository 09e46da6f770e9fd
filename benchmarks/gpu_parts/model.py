"""Models of the GPU benchmarks, the plain loop that they are compared with, and engines on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import Engine, Transport, build_model
from quintsched.runtime.comm import LocalTransport, LocalWorld
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, gpt, gpt_sizes
from quintsched.runtime.train.built_in_losses import cross_entropy_sum
from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.prediction.predict_one_strategy import model_flops

AdamW = partial(torch.optim.AdamW, lr=1e-4)


@dataclass(frozen=True)
class Size:
    """A GPT, and the size of its batches."""

    title: str
    hidden: int
    depth: int
    heads: int
    tokens: int
    length: int
    samples: int
    """Samples of a microbatch."""
    microbatches: int
    steps: int
    """Steps of one sample of the measurement."""
    variant: tuple[tuple[str, Any], ...] = ()
    """Further options of the model, such as a Llama's."""

    @property
    def _made_of(self) -> tuple[DataSpec, GPTOptions]:
        data = DataSpec(input_shape=(self.length,), num_classes=self.tokens)
        return data, GPTOptions(hidden=self.hidden, depth=self.depth, heads=self.heads, **dict(self.variant))

    def blocks(self) -> Sequence[Callable[[], nn.Module]]:
        return gpt(*self._made_of)

    def model(self) -> Model:
        """Return its sizes, for predictions."""
        return gpt_sizes(*self._made_of)

    @property
    def tokens_in_step(self) -> int:
        return self.microbatches * self.samples * self.length

    @property
    def flops(self) -> float:
        """FLOPs of a step: those of the model, without recomputation, attention counted without its causal mask."""
        return model_flops(self.model(), self.length) * self.microbatches * self.samples

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return token ids and the next ids."""
        random = torch.Generator().manual_seed(0)
        shape = (self.microbatches * self.samples, self.length + 1)
        ids = torch.randint(0, self.tokens, shape, generator=random).to(device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def plan(self, schedule: str, chunks: int | None = None, pp: int = 1, **more: Any) -> qs.Plan:
        return qs.compile(schedule, mesh=qs.Mesh(pp=pp), microbatches=self.microbatches, chunks=chunks, **more)


LLAMA = (("kv_heads", 8), ("norm", "rmsnorm"), ("positions", "rope"), ("activation", "swiglu"))

GPT_350M = Size("GPT of 350 M", 1024, 24, 16, 50304, 1024, samples=16, microbatches=4, steps=1)
LLAMA_1B = Size("Llama of 1 B", 2048, 16, 32, 32000, 2048, samples=4, microbatches=4, steps=1, variant=LLAMA)
LLAMA_300M = Size("Llama of 300 M", 1024, 20, 16, 8192, 2048, samples=4, microbatches=2, steps=1, variant=LLAMA)
MEDIUM = Size("GPT of 100 M", 1024, 8, 16, 4096, 1024, samples=16, microbatches=4, steps=1)
SHARED = Size("GPT of 100 M", 1024, 8, 16, 4096, 1024, samples=2, microbatches=8, steps=1)
"""For ranks that share a GPU."""
SMALL = Size("small microbatches", 512, 4, 8, 4096, 128, samples=1, microbatches=8, steps=4)
TINY = Size("tiny", 32, 6, 4, 64, 16, samples=1, microbatches=4, steps=1)


def sized(size: Size, device: torch.device) -> Size:
    """Return the size on a GPU; on a CPU one that tries the script itself."""
    return size if device.type == "cuda" else TINY


class PlainLoop:
    """A hand-written loop over the microbatches that accumulates gradients in float32."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self._microbatches = size.microbatches
        self._model = build_model(size.blocks(), 0, torch.bfloat16).to(device)
        self._weights = list(self._model.parameters())
        self._masters = {name: nn.Parameter(p.detach().float()) for name, p in self._model.named_parameters()}
        numels = [p.numel() for p in self._weights]
        self._flat = torch.zeros(sum(numels), device=device)
        self._sums = [v.view_as(p) for v, p in zip(self._flat.split(numels), self._weights, strict=True)]
        for master, view in zip(self._masters.values(), self._sums, strict=True):
            master.grad = view
        self._optimizer = AdamW(list(self._masters.values()))

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Train on a batch; returns its loss."""
        losses, weights = [], []
        pieces = (tensor.split(tensor.shape[0] // self._microbatches) for tensor in (inputs, targets))
        for some_inputs, some_targets in zip(*pieces, strict=True):
            loss, weight = cross_entropy_sum(self._model(some_inputs), some_targets)
            loss.backward()
            torch._foreach_add_(self._sums, [p.grad for p in self._weights if p.grad is not None])
            for p in self._weights:
                p.grad = None
            losses.append(loss.detach())
            weights.append(weight)
        total = torch.stack(weights).sum(dtype=torch.float64)
        self._flat.div_(total)
        if math.isfinite(torch.linalg.vector_norm(self._flat).item()):
            self._optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(list[Tensor](self._weights), list(self._masters.values()))
        self._flat.zero_()
        return torch.stack(losses).sum(dtype=torch.float64) / total

    def masters(self) -> Mapping[str, Tensor]:
        return self._masters


def make_engine(
    size: Size,
    plan: qs.Plan,
    transport: Transport,
    trace_steps: range | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **more: Any,
) -> Engine:
    return Engine(
        plan, size.blocks(), cross_entropy_sum, AdamW, dtype=dtype, trace_steps=trace_steps, transport=transport, **more
    )


def alone(device: torch.device) -> Transport:
    """Return the transport of one rank without any message."""
    return LocalTransport(LocalWorld(1, device=device), 0)


def masters_of(engine: Engine) -> dict[str, Tensor]:
    stages = engine.stages.values()
    owned = ((name, engine.masters.master_of(p)) for stage in stages for name, p in stage.named_weights().items())
    return {name: master for name, master in owned if master is not None}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def whole(step: Callable[..., object], batch: Sequence[Tensor | None], device: torch.device) -> Callable[[], None]:
    """Return a step that ends when the device has completed it."""

    def run() -> None:
        step(*batch)
        synchronize(device)

    return run


def share_of(engine: Engine, batch: tuple[Tensor, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Return the inputs and targets that a rank of a pipeline needs of a batch."""
    inputs, targets = batch
    return inputs if engine.needs_inputs else None, targets if engine.needs_targets else None
