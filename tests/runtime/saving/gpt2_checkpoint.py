"""A checkpoint of GPT-2's shape, with random weights, and engines of that model."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime.data import DataSpec
from quintsched.runtime.engine import Engine
from quintsched.runtime.models.gpt import GPTOptions, gpt, gpt_tied
from quintsched.runtime.train.built_in_losses import cross_entropy_sum

from ..toys import CLASSES, sgd
from .split_models import plan_of, run_engines

HIDDEN, DEPTH, HEADS, LENGTH = 16, 2, 4, 8
OPTIONS = GPTOptions(hidden=HIDDEN, depth=DEPTH, heads=HEADS, activation="gelu_tanh")
Weights = dict[str, Tensor]


def draw_checkpoint(prefix: str = "", *, head: bool = False) -> Weights:
    """Return random weights under GPT-2's names; norms are no identity, and positions are more than the model's."""
    random = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64) / 4

    made = {"wte.weight": draw(CLASSES, HIDDEN), "wpe.weight": draw(LENGTH + 3, HIDDEN)}
    sizes = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}
    for layer in range(DEPTH):
        for norm in ("ln_1", "ln_2"):
            made |= {f"h.{layer}.{norm}.{kind}": draw(HIDDEN) for kind in ("weight", "bias")}
        for name, (rows, columns) in sizes.items():
            made[f"h.{layer}.{name}.weight"] = draw(rows * HIDDEN, columns * HIDDEN)
            made[f"h.{layer}.{name}.bias"] = draw(columns * HIDDEN)
        made[f"h.{layer}.attn.bias"] = torch.ones(1, 1, LENGTH, LENGTH).tril()
    made |= {f"ln_f.{kind}": draw(HIDDEN) for kind in ("weight", "bias")}
    made = {f"{prefix}{name}": tensor for name, tensor in made.items()}
    return made | ({"lm_head.weight": draw(CLASSES, HIDDEN)} if head else {})


def run_gpt2(weights: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """GPT-2, spelled out from its paper: ids (B, S) → logits (B, S, V)."""

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return centred / deviation * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def product(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def attend(x: Tensor, name: str) -> Tensor:
        length, width = x.shape[1], HIDDEN // HEADS
        query, key, value = product(x, f"{name}.c_attn").split(HIDDEN, -1)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = []
        for head in range(HEADS):
            own = slice(head * width, (head + 1) * width)
            scores = query[..., own] @ key[..., own].transpose(1, 2) / math.sqrt(width)
            mixed.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ value[..., own])
        return product(torch.cat(mixed, -1), f"{name}.c_proj")

    def transform(x: Tensor, name: str) -> Tensor:
        wide = product(x, f"{name}.c_fc")
        bent = 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
        return product(bent, f"{name}.c_proj")

    x = weights["wte.weight"][ids] + weights["wpe.weight"][: ids.shape[1]]
    for layer in range(DEPTH):
        x = x + attend(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn")
        x = x + transform(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp")
    return norm(x, "ln_f") @ weights.get("lm_head.weight", weights["wte.weight"]).t()


def on_ranks(plan: qs.Plan, body: Callable[[Engine], Any], options: GPTOptions = OPTIONS) -> list[Any]:
    """Call with an engine of the model on each rank."""
    blocks = gpt(DataSpec(input_shape=(LENGTH,), num_classes=CLASSES), options)
    how = {"optimizer": sgd, "dtype": torch.float64, "tied": gpt_tied(options)}
    return run_engines(plan, lambda: blocks, body, cross_entropy_sum, **how)


def load_alone(path: Path, options: GPTOptions = OPTIONS) -> Engine:
    """Load a checkpoint into a model in one process."""

    def body(engine: Engine) -> Engine:
        engine.load_pretrained(path)
        return engine

    return on_ranks(plan_of("dp=1", 0), body, options)[0]


def write(folder: Path, weights: Weights, config: Mapping[str, Any] | None = None) -> Path:
    path = folder / "model.safetensors"
    save_file(weights, path)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return path


def logits_of(engine: Engine, ids: Tensor) -> Tensor:
    model = nn.Sequential(*engine.stages[0].blocks.values())
    with torch.no_grad():
        out: Tensor = model(ids)
    return out
