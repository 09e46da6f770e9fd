"""Arguments of Megatron-LM's `pretrain_gpt.py` for a model and a strategy, one to a line."""

from __future__ import annotations

from collections.abc import Iterator

from quintsched.strategies.descriptions.model import Model
from quintsched.strategies.descriptions.strategy import SHORT, Strategy, modules_of
from quintsched.strategies.descriptions.strategy_validity import has_light_ends, num_stages, stage_layers

POSITIONS = {"learned": "learned_absolute", "rope": "rope", "none": "none"}
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
MEGATRON_MODULES = ("core_attn", "layernorm", "mla_up_proj", "moe_act")
"""Modules of a layer that Megatron-LM recomputes by the same names; it has none for the activation alone of a plain
feed-forward network."""


def megatron_arguments(model: Model, strategy: Strategy) -> str:
    """Return the text of a file of arguments; `strategy` is resolved."""
    return "".join(f"{line}\n" for line in (*_of_model(model, strategy), *_of_strategy(model, strategy)))


def megatron_notes(model: Model, strategy: Strategy) -> Iterator[str]:
    """Yield what the arguments do not say."""
    yield "data, tokenizer, optimizer and checkpoints: your own arguments"
    if model.activation not in ("gelu", "swiglu"):
        yield f"the activation {model.activation} has no argument"
    if model.positions not in POSITIONS:
        yield f"positions {model.positions} have no argument"
    if model.parallel_block:
        yield "attention and feed-forward network side by side have no argument"
    if model.window_except > 1:
        yield f"every {model.window_except}-th layer attends to all keys: --window-attn-skip-freq"
    if model.delta:
        yield "the share of each head that is rotated: --rotary-percent"
    if model.experts and model.experts.nodes:
        yield "routing to few nodes: --moe-router-num-groups and --moe-router-group-topk"
    if strategy.tp > 1 and strategy.tp_overlap:
        yield "CUDA_DEVICE_MAX_CONNECTIONS=1, so that reductions over tp run beside products"


def _of_model(model: Model, strategy: Strategy) -> Iterator[str]:
    yield f"--num-layers {model.layers}"
    yield f"--hidden-size {model.hidden}"
    yield f"--ffn-hidden-size {model.ffn_width}"
    yield f"--num-attention-heads {model.heads}"
    yield from _of_heads(model)
    yield f"--vocab-size {model.vocab}"
    yield f"--seq-length {strategy.seq}"
    yield f"--max-position-embeddings {max(model.seq, strategy.seq)}"
    if model.positions in POSITIONS:
        yield f"--position-embedding-type {POSITIONS[model.positions]}"
    if model.positions == "rope":
        yield f"--rotary-base {model.rope_base:.0f}"
    yield f"--normalization {NORMS[model.norm]}"
    yield f"--attention-dropout {0.1 if model.dropout else 0.0}"
    yield f"--hidden-dropout {0.1 if model.dropout else 0.0}"
    switches = {
        "--swiglu": model.activation == "swiglu",
        "--disable-bias-linear": not model.biases,
        "--add-qkv-bias": bool(model.qkv_biases) and not model.biases,
        "--qk-layernorm": model.qk_norm,
        "--attention-output-gate": model.attention_gate,
        "--moe-shared-expert-gate": bool(model.experts and model.experts.shared_gate),
        "--untie-embeddings-and-output-weights": not model.tied,
    }
    yield from (name for name, on in switches.items() if on)
    if model.sinks:
        yield "--softmax-type learnable"
    if delta := model.delta:
        yield "--experimental-attention-variant gated_delta_net"
        yield f"--linear-attention-freq {delta.except_every}"
        yield f"--linear-conv-kernel-dim {delta.convolution}"
        for name, heads, size in (
            ("key", delta.key_heads, delta.key_size),
            ("value", delta.value_heads, delta.value_size),
        ):
            yield f"--linear-num-{name}-heads {heads}"
            yield f"--linear-{name}-head-dim {size}"
    if model.window:
        yield f"--window-size ({model.window - 1},0)"
    if experts := model.experts:
        yield f"--num-experts {experts.count}"
        yield f"--moe-router-topk {experts.top_k}"
        yield f"--moe-ffn-hidden-size {experts.ffn}"
        if experts.shared:
            yield f"--moe-shared-expert-intermediate-size {experts.shared * experts.ffn}"
        pattern = ",".join(str(int(has)) for has in model.has_experts)
        yield f"--moe-layer-freq ([{pattern}])"
        yield "--moe-token-dispatcher-type alltoall"
        yield "--moe-grouped-gemm"


def _of_heads(model: Model) -> Iterator[str]:
    if latent := model.latent:
        yield "--multi-latent-attention"
        yield f"--kv-lora-rank {latent.kv_rank}"
        if latent.q_rank:
            yield f"--q-lora-rank {latent.q_rank}"
        yield f"--qk-head-dim {model.head_width}"
        yield f"--qk-pos-emb-head-dim {latent.rope_size}"
        yield f"--v-head-dim {latent.value_size}"
        return
    yield f"--kv-channels {model.head_width}"
    if model.num_kv_heads < model.heads:
        yield "--group-query-attention"
        yield f"--num-query-groups {model.num_kv_heads}"


def _of_strategy(model: Model, strategy: Strategy) -> Iterator[str]:
    yield f"--tensor-model-parallel-size {strategy.tp}"
    yield f"--pipeline-model-parallel-size {strategy.pp}"
    yield f"--context-parallel-size {strategy.cp}"
    if model.experts:
        yield f"--expert-model-parallel-size {strategy.ep}"
    yield from _stages(model, strategy)
    yield f"--micro-batch-size {strategy.microbatch}"
    yield f"--global-batch-size {strategy.batch}"
    interleaves = strategy.schedule == "interleaved-1f1b" and strategy.pp > 1
    switches = {
        "--sequence-parallel": strategy.sequence_parallel and strategy.tp > 1,
        "--use-distributed-optimizer": strategy.zero == 1,
        "--overlap-grad-reduce": strategy.overlap,
        "--overlap-param-gather": strategy.overlap and strategy.zero == 1,
        "--no-overlap-p2p-communication": interleaves and not strategy.overlap,
        "--overlap-moe-expert-parallel-comm": strategy.ep > 1 and strategy.ep_overlap and interleaves,
        "--no-gradient-accumulation-fusion": not strategy.fused_accumulation,
        "--cross-entropy-loss-fusion": strategy.fused_loss,
        "--bf16": strategy.dtype == "bf16" or strategy.dtype in SHORT,
        "--fp16": strategy.dtype == "fp16",
        "--grad-reduce-in-bf16": strategy.gradients == "bf16",
        "--accumulate-allreduce-grads-in-fp32": (strategy.dtype, strategy.gradients) == ("fp16", "fp32"),
    }
    yield from (name for name, on in switches.items() if on)
    if strategy.dtype in SHORT:
        yield f"--fp8-format {'e4m3' if strategy.dtype == 'mxfp8' else 'hybrid'}"
        yield f"--fp8-recipe {'mxfp8' if strategy.dtype == 'mxfp8' else 'blockwise'}"
    yield from _recompute(strategy)


def _stages(model: Model, strategy: Strategy) -> Iterator[str]:
    """Yield the cut into stages: even, even with embedding and loss counted as layers, or stage by stage."""
    stages = num_stages(strategy)
    layers = strategy.stages or stage_layers(model.layers, stages)
    light = has_light_ends(model.layers, stages) and layers == stage_layers(model.layers, stages)
    if strategy.pp > 1 and not light and len(set(layers)) > 1:
        yield f"--pipeline-model-parallel-layout E{'|'.join('t' * count for count in layers)}L"
        return
    if strategy.pp > 1 and stages > strategy.pp:
        yield f"--num-virtual-stages-per-pipeline-rank {strategy.chunks}"
    if light:
        yield "--account-for-embedding-in-pipeline-split"
        yield "--account-for-loss-in-pipeline-split"


def _recompute(strategy: Strategy) -> Iterator[str]:
    modules = modules_of(strategy.recompute)
    if modules:
        yield "--recompute-granularity selective"
        yield f"--recompute-modules {' '.join(modules)}"
    elif strategy.recompute == "full":
        yield "--recompute-granularity full"
        yield "--recompute-method uniform"
        yield "--recompute-num-layers 1"
    elif isinstance(strategy.recompute, int) and strategy.recompute:
        yield "--recompute-granularity full"
        yield "--recompute-method block"
        yield f"--recompute-num-layers {strategy.recompute}"
