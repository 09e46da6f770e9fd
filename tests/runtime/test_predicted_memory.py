"""Predicted memory of CPU ranks equals the real one, to the byte, for each rank of 26 strategies.

Activations are what autograd saves. Sizes are such that aligning weights leaves nothing over; what it leaves elsewhere
is bounded in `weights_and_gradients/test_zero`.
"""

from math import prod
from typing import Any

import pytest
import torch

import quintsched as qs
from quintsched.runtime import Engine
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models import build_model as blocks_of
from quintsched.runtime.settings.job_file import ModelConfig
from quintsched.runtime.train.built_in_losses import cross_entropy_sum
from quintsched.strategies.descriptions.hardware import Curve, Hardware, MeasuredRates
from quintsched.strategies.descriptions.model import Experts, Images, Model
from quintsched.strategies.descriptions.strategy_validity import resolved
from quintsched.strategies.prediction.strategy_columns import Table
from quintsched.strategies.prediction.strategy_plans import plan_of
from quintsched.strategies.prediction.vectorized_prediction import held
from quintsched.strategies.tuning.export.emit import built_in

from ..helpers.training import run_engines
from .toys import adam

SEQ, VOCAB, CLASSES = 32, 128, 16
GPT = Model(layers=4, hidden=64, heads=4, vocab=VOCAB, seq=SEQ, tied=False, dropout=False)
LLAMA = GPT.model_copy(update={"kv_heads": 2, "norm": "rmsnorm", "positions": "rope", "activation": "swiglu"})
DROPPING = GPT.model_copy(update={"dropout": True})
ROPE = GPT.model_copy(update={"positions": "rope"})
MOE = GPT.model_copy(update={"experts": Experts(count=4, top_k=4, ffn=256)})
PADDED = GPT.model_copy(update={"experts": Experts(count=4, top_k=2, ffn=256, padded_to=1.5)})
IMAGES = Images(size=16, patch=4, channels=3, classes=CLASSES)
VIT = GPT.model_copy(update={"vocab": 0, "seq": 17, "images": IMAGES, "causal": False})
CURVE = Curve(sizes=(1.0, 2.0), rates=(1.0, 1.0))
MEASURED = MeasuredRates(
    cores=2, link=CURVE, link_work=CURVE, all_reduce={2: CURVE}, all_reduce_work={2: CURVE}, sharing={2: 1.0}
)
SPEEDS: dict[str, Any] = {"tflops": {"fp32": 0.1}, "memory_gbps": 10, "link_gbps": 1, "network_gbps": 1}
HARDWARE = Hardware(name="cpu", memory_gb=4, reserved_gb=0, measured=MEASURED, **SPEEDS)
CASES: dict[str, tuple[Model, dict[str, Any]]] = {
    "dp=2, zero 1": (GPT, {"dp": 2, "zero": 1}),
    "dp=2, zero 2": (GPT, {"dp": 2, "zero": 2}),
    "dp=2, pp=2, zero 3, bf16": (GPT, {"dp": 2, "pp": 2, "zero": 3, "dtype": "bf16"}),
    "cp=2, zero 3": (GPT, {"cp": 2, "zero": 3}),
    "pp=2": (GPT, {"pp": 2}),
    "pp=4": (GPT, {"pp": 4}),
    "tp=2": (GPT, {"tp": 2}),
    "tp=2, tokens too": (DROPPING, {"tp": 2, "sequence_parallel": True}),
    "cp=2": (GPT, {"cp": 2}),
    "pp=2, tp=2, bf16": (GPT, {"pp": 2, "tp": 2, "dtype": "bf16"}),
    "cp=2, bf16": (GPT, {"cp": 2, "dtype": "bf16"}),
    "pp=2, recompute": (GPT, {"pp": 2, "recompute": "full"}),
    "pp=4, recompute": (GPT, {"pp": 4, "recompute": "full"}),
    "interleaved": (GPT, {"pp": 2, "chunks": 2, "schedule": "interleaved-1f1b"}),
    "gpipe": (DROPPING, {"pp": 2, "schedule": "gpipe"}),
    "llama, pp=2": (LLAMA, {"pp": 2}),
    "llama, tp=2, bf16": (LLAMA, {"tp": 2, "dtype": "bf16"}),
    "llama, cp=2": (LLAMA, {"cp": 2}),
    "rotations, eager": (ROPE, {"pp": 2, "schedule": "eager-1f1b"}),
    "moe, pp=2": (MOE, {"pp": 2}),
    "moe, ep=2, bf16": (MOE, {"ep": 2, "dtype": "bf16"}),
    "moe, tp=2": (MOE, {"tp": 2}),
    "padded, ep=2": (PADDED, {"ep": 2}),
    "padded, pp=2, bf16": (PADDED, {"pp": 2, "dtype": "bf16"}),
    "vit, pp=2": (VIT, {"pp": 2}),
    "vit, dp=2, tp=2": (VIT, {"dp": 2, "tp": 2}),
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def strategy_of(model: Model, given: dict[str, Any]) -> qs.Strategy:
    """Return four microbatches of two samples."""
    ranks = prod(given.get(axis, 1) for axis in ("dp", "tp", "pp", "cp", "ep"))
    batch = 8 * given.get("dp", 1) * given.get("ep", 1)
    return resolved(qs.Strategy(gpus=ranks, batch=batch, microbatch=2, seq=model.seq, **{"dtype": "fp32", **given}))


def measure(model: Model, strategy: qs.Strategy) -> tuple[qs.Plan, list[tuple[int, int, int]]]:
    """Return the plan, and the bytes on each rank in its second step: weights and gradients, optimizer, activations.

    The optimizer's counters of steps, four for each weight, are left out.
    """
    plan, (name, options) = plan_of(model, strategy), built_in(model)
    shape, classes = ((3, 16, 16), CLASSES) if model.images else ((SEQ,), VOCAB)
    data = DataSpec(input_shape=shape, num_classes=classes)
    random = torch.Generator().manual_seed(0)
    if model.images:
        inputs, targets = torch.randn(8, *shape, generator=random), torch.randint(classes, (8,), generator=random)
    else:
        inputs, targets = torch.randint(classes, (2, 8, SEQ), generator=random)

    def run(engine: Engine) -> tuple[int, int, int]:
        engine.step(inputs, targets)
        _, saved = engine.step_counting_saved(inputs, targets)
        found = engine.state_bytes()
        states = [kept for optimizer in engine.optimizers.values() for kept in optimizer.state.values()]
        counters = sum(value.nbytes for kept in states for value in kept.values() if value.dim() == 0)
        return found.weights + found.gradients, found.optimizer - counters, saved.peak

    told = {"dtype": TYPES[strategy.dtype], "sequence_parallel": strategy.sequence_parallel}
    blocks = blocks_of(ModelConfig(name=str(name), options=options), data)
    return plan, run_engines(plan, lambda: blocks, run, cross_entropy_sum, adam, **told)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_ranks_hold_what_is_predicted(name: str) -> None:
    model, given = CASES[name]
    strategy = strategy_of(model, given)
    terms, kinds = held(model, HARDWARE, Table.from_strategies([strategy]), each_rank=True)
    plan, measured = measure(model, strategy)
    for rank, found in enumerate(measured):
        place = list(kinds.rank[0]).index(plan.mesh.coordinates(rank).get("pp", 0))
        here = {kind: bytes_[0, place] for kind, bytes_ in terms.items()}
        kept = sum(bytes_ for kind, bytes_ in here.items() if kind.startswith("activations") or kind == "logits")
        state = here["weights"] + here["gradients"] + here["gathered"]
        assert (state, here["optimizer"], kept) == found
