"""Models that cases of the grid train, small ones of every kind; optimizers; schedules of a user's own."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched import torch_csv
from quintsched.ir.instruction_set import Bwd, Fwd
from quintsched.runtime.blocks.block_builders import Blocks
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, MoEGPTOptions, gpt, moe_gpt
from quintsched.runtime.models.vit import ViTOptions, vit
from quintsched.schedules import Order, Schedule, Shape

from .parallel.lively import LLAMA, livelier
from .toys import CLASSES, cross_entropy_plainly

TRAINING = tuple(schedule.name for schedule in qs.all_schedules() if schedule.mode == "train")
"""Schedules of the package, before other tests register theirs."""
TWO_CHUNKS = ("interleaved-1f1b", "interleaved-zb", "zbv", "v-half", "v-min", "dualpipe-v", "hanayo")
"""Schedules that have two stages on each rank unless they are told another number."""


def through_file(plan: qs.Plan) -> qs.Plan:
    """The plan as it comes back from its own file."""
    return qs.Plan.from_json(plan.to_json())


def through_csv(plan: qs.Plan) -> qs.Plan:
    """The plan as it comes back from PyTorch's schedule file, its messages where they were."""
    return torch_csv.loads(torch_csv.dumps(plan), mesh=plan.mesh).plan


def through_bare_csv(plan: qs.Plan) -> qs.Plan:
    """The plan as it comes back from PyTorch's schedule file of computations only."""
    return torch_csv.loads(torch_csv.dumps(plan, compute_only=True), mesh=plan.mesh).plan


def _last_first(rank: int, shape: Shape) -> Order:
    """A user's own GPipe: rank 0 holds the last stage too, and backwards begin with the last microbatch."""
    stages, microbatches = shape.stages_of(rank), range(shape.microbatches)
    yield from (Fwd(stage, microbatch) for stage in stages for microbatch in microbatches)
    yield from (Bwd(stage, microbatch) for stage in reversed(stages) for microbatch in reversed(microbatches))


def _by_pairs(rank: int, shape: Shape) -> Order:
    """A user's own 1F1B: two microbatches forward, the same two back, the second first."""
    pairs = [(first, first + 1) for first in range(0, shape.microbatches, 2)]
    warmup = min(shape.pp - rank - 1, len(pairs))
    for k in range(len(pairs) + warmup):
        if k < len(pairs):
            yield from (Fwd(rank, microbatch) for microbatch in pairs[k])
        if k >= warmup:
            yield from (Bwd(rank, microbatch) for microbatch in reversed(pairs[k - warmup]))


LAST_FIRST = Schedule(
    "last-first", _last_first, summary="own", bubble="?", memory="M", placement=lambda pp, chunks: (*range(pp), 0)
)
BY_PAIRS = Schedule("by-pairs", _by_pairs, summary="own", bubble="?", memory="2P")


class Residual(nn.Module):
    """A block of a user's own, with a pair of layers that tensor parallelism may cut."""

    def __init__(self, width: int, *, is_odd: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(width)) if is_odd else None

    def forward(self, x: Tensor) -> Tensor:
        """Add what the pair makes of the input, (…, width)."""
        grown = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + (grown if self.scale is None else grown * self.scale.tanh() + x.mean(-1, keepdim=True).sin())


QWEN = LLAMA | {"head_size": 4, "ffn": 24, "mlp_ratio": None, "biases": False, "qk_norm": True, "rope_base": 500.0}
PADDED = {"capacity_factor": 8.0, "pad_to_capacity": True}
"""Every expert is given a row of each token; in one process, which does without that, none is dropped either."""
SHAPES = {"vit": (1, 8, 8), "own": (6,), "odd": (6,)}
EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "experts": {"dropout": 0.1},
    "llama": LLAMA | {"dropout": 0.2, "shared_experts": 1, "renormalise": True},
    "tied experts": {"dropout": 0.3, "tied": True, "every": 2},
    "switch": PADDED | {"dropout": 0.1, "top_k": 1, "experts": 8, "positions": "rope", "activation": "swiglu"},
    "tied qwen": QWEN | {"dropout": 0.1, "tied": True, "top_k": 3},
}
"""Mixtures of experts with both auxiliary losses, which are means over a microbatch."""
MODELS = ("gpt", "vit", "tied", "own", "odd", *EXPERTS)
TIED = ("tied", "tied experts", "tied qwen")


def blocks_of(model: str, depth: int, length: int, dtype: torch.dtype, *, pads: bool = True, **changed: Any) -> Blocks:
    """Build a model, whose attention and routers prefer some tokens to others, and which drops out where it can.

    In float32 a token goes to all experts: where two are nearly alike, rounding would decide which one it goes to.
    """
    data = DataSpec(input_shape=SHAPES.get(model, (length,)), num_classes=CLASSES)
    if model == "vit":
        return vit(data, ViTOptions(hidden=16, depth=depth, heads=4, dropout=0.1))
    if model in SHAPES:
        layers = [partial(Residual, 16, is_odd=model == "odd") for _ in range(depth)]
        return [lambda: nn.Linear(6, 16), *layers, lambda: nn.Linear(16, CLASSES)]
    if model not in EXPERTS:
        parts = QWEN | {"tied": True} if model == "tied" else {"heads": 4}
        return [livelier(block) for block in gpt(data, GPTOptions(hidden=16, depth=depth, dropout=0.1, **parts))]
    options = {"experts": 4, "mlp_ratio": 2, "balance": 0.05, "z": 0.01, **EXPERTS[model], **changed}
    options |= {"top_k": options["experts"]} if dtype == torch.float32 else {}
    options = {name: value for name, value in options.items() if pads or name not in PADDED}
    return [livelier(block) for block in moe_gpt(data, MoEGPTOptions(hidden=16, depth=depth, **options))]


ce_sum = cross_entropy_plainly


def ce_mean(output: Tensor, targets: Tensor) -> Tensor:
    """Return it as a mean, whose weight the engine has to find."""
    return nn.functional.cross_entropy(output.flatten(0, -2), targets.flatten())


OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda weights: torch.optim.Adam(weights, lr=1e-3, eps=1e-4),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-3, eps=1e-4, weight_decay=0.1, amsgrad=True),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=1e-2, initial_accumulator_value=0.1),
}
