"""Arguments of torchtitan, one to a line, and DeepSpeed's configuration, for a model and a strategy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import Strategy
from quintsched.strategies.descriptions.strategy_validity import has_light_ends, num_stages

NAMES_OF_SCHEDULES = {
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "gpipe": "GPipe",
    "interleaved-zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
"""Schedules of torch.distributed.pipelining, by our names."""


def torchtitan_arguments(model: Model, strategy: Strategy) -> str:
    """Return the text of a file of arguments; `strategy` is resolved."""
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": strategy.replicas,
        "fsdp_reshard_after_forward": "always" if strategy.zero == 3 else "never",
        "tensor_parallel_degree": strategy.tp,
        "context_parallel_degree": strategy.cp,
        "expert_parallel_degree": strategy.ep,
        "pipeline_parallel_degree": strategy.pp,
    }
    if strategy.pp > 1:
        light = int(has_light_ends(model.layers, num_stages(strategy)))
        parallelism |= {
            "pipeline_parallel_schedule": NAMES_OF_SCHEDULES[str(strategy.schedule)],
            "pipeline_parallel_layers_per_stage": -(-(model.layers + 2 * light) // num_stages(strategy)),
            "pipeline_parallel_first_stage_less_layers": light,
            "pipeline_parallel_last_stage_less_layers": light,
            "num_pp_microbatches": strategy.microbatches,
        }
    training = {
        "num_tokens_per_microbatch_per_dp_rank": strategy.microbatch * strategy.seq,
        "num_tokens_per_train_step": strategy.batch * strategy.seq,
        "max_context_length": strategy.seq,
        "mixed_precision_param": {"bf16": "bfloat16", "fp32": "float32"}[strategy.dtype],
    }
    sections = {"parallelism": parallelism, "training": training}
    return "".join(f"--{name}.{key} {value}\n" for name, keys in sections.items() for key, value in keys.items())


def torchtitan_notes(model: Model, strategy: Strategy) -> Iterator[str]:
    """Yield what the arguments do not say."""
    yield f"--module and --config: those of {model.name}"
    word = "FullAC.Config()" if strategy.recompute == "full" else "no activation checkpointing"
    yield f"activation_checkpoint of that config: {word}"
    if strategy.pp > 1 and strategy.zero_every < strategy.microbatches:
        yield f"beside a pipeline, gradients are reduced once: --zero-every {strategy.microbatches} predicts that"


def deepspeed_arguments(model: Model, strategy: Strategy) -> str:
    """Return the text of a configuration file; `strategy` is resolved."""
    found: dict[str, Any] = {
        "train_batch_size": strategy.batch,
        "train_micro_batch_size_per_gpu": strategy.microbatch,
        "gradient_accumulation_steps": strategy.microbatches,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": strategy.zero, "overlap_comm": strategy.overlap},
    }
    if strategy.dtype != "fp32":
        found[strategy.dtype] = {"enabled": True}
    if strategy.gradients is not None:
        found["communication_data_type"] = strategy.gradients
        found["data_types"] = {"grad_accum_dtype": strategy.gradients}
    if strategy.tp > 1:
        found["tensor_parallel"] = {"autotp_size": strategy.tp}
    return json.dumps(found, indent=1) + "\n"


def deepspeed_notes(model: Model, strategy: Strategy) -> Iterator[str]:
    """Yield what the configuration does not say."""
    if strategy.pp > 1:
        yield f"the model is a PipelineModule of num_stages={strategy.pp}"
    if strategy.ep > 1:
        yield f"its experts are deepspeed.moe.layer.MoE with ep_size={strategy.ep}"
    if strategy.recompute == "full":
        yield "the model checkpoints each layer: deepspeed.checkpointing, or gradient_checkpointing_enable()"
