"""Models of transformers: loaded, trained on meshes, saved: what `from_pretrained` and a plain loop have."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from quintsched.runtime import split
from quintsched.runtime.engine import Engine
from quintsched.runtime.saving.pretrained.load_pretrained import LoadedWeights
from quintsched.runtime.splitting.split_model import Split

from ...helpers.training import call_with_share, train_alone
from ..toys import adam
from .split_models import plan_of, require_same, run_engines

transformers = pytest.importorskip("transformers")
conversion_mapping = pytest.importorskip("transformers.conversion_mapping")

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}


def llama(seed: int = 0, **more: Any) -> nn.Module:
    config = transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 2} | more)
    return made(transformers.LlamaForCausalLM, config, seed)


def gpt2(seed: int = 0) -> nn.Module:
    sizes = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return made(transformers.GPT2LMHeadModel, transformers.GPT2Config(**sizes, **drops), seed)


def qwen3(seed: int = 0) -> nn.Module:
    config = transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=4, tie_word_embeddings=True)
    return made(transformers.Qwen3ForCausalLM, config, seed)


def mixtral(seed: int = 0) -> nn.Module:
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    return made(transformers.MixtralForCausalLM, config, seed)


def made(kind: Any, config: Any, seed: int) -> nn.Module:
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = kind(config).double().train()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor), alpha=0.05)
    return model


def loss_of(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    loss = nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    return loss, torch.tensor(float(targets.numel()))


def data(steps: int = 2) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(4)
    return [
        (torch.randint(40, (4, 6), generator=random), torch.randint(40, (4, 6), generator=random)) for _ in range(steps)
    ]


@pytest.mark.parametrize(("family", "mesh", "zero"), [(llama, "tp=2", 0), (gpt2, "dp=2", 3), (qwen3, "pp=2", 0)])
def test_there_and_back(tmp_path: Path, family: Callable[..., nn.Module], mesh: str, zero: int) -> None:
    origin = family(1)
    origin.save_pretrained(tmp_path / "in", max_shard_size="5KB")

    def body(engine: Engine) -> None:
        assert engine.load_pretrained(tmp_path / "in") == LoadedWeights()
        engine.save_pretrained(tmp_path / "untrained", max_file_bytes=5000)
        for batch in data():
            call_with_share(engine, engine.step, batch)
        engine.save_pretrained(tmp_path / "out")

    run_engines(plan_of(mesh, zero), lambda: split(family()), body, loss_of)
    require_same(reloaded(origin, tmp_path / "untrained").state_dict(), origin.state_dict())
    found = reloaded(origin, tmp_path / "out").state_dict()
    expected = train_alone(origin, lambda output, targets: loss_of(output.logits, targets), adam, data())
    assert all(torch.allclose(found[name], weight, rtol=1e-9, atol=1e-9) for name, weight in expected.weights.items())


def reloaded(like: nn.Module, folder: Path) -> nn.Module:
    found, info = type(like).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert found.dtype == torch.float64
    return found


@pytest.mark.parametrize(("mesh", "zero"), [("dp=1", 0), ("dp=2", 3)])
def test_experts_stored_one_by_one_are_read_as_one_tensor(tmp_path: Path, mesh: str, zero: int) -> None:
    """By a block that holds the model's tensors under its names, and cannot be run."""
    origin, other = mixtral(1), mixtral(2)
    origin.save_pretrained(tmp_path / "in")
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in load_file(tmp_path / "in" / "model.safetensors")
    conversions = conversion_mapping.get_model_conversion_mapping(other)
    how = {"own_names": {f"0.{name}": name for name in other.state_dict()}, "config": other.config}

    def body(engine: Engine) -> None:
        assert engine.load_pretrained(tmp_path / "in") == LoadedWeights()
        engine.save_pretrained(tmp_path / "out")

    run_engines(plan_of(mesh, zero), lambda: Split([copy.deepcopy(other)], conversions=conversions, **how), body)
    require_same(reloaded(origin, tmp_path / "out").state_dict(), origin.state_dict())
