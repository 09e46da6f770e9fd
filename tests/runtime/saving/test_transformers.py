"""Models of transformers: loaded, trained on meshes, saved: what `from_pretrained` and a plain loop have."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime import split
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.engine import Engine
from quintsched.runtime.saving.pretrained.load_pretrained import LoadedWeights
from quintsched.runtime.splitting.split_model import Split

from ...helpers.training import call_with_share, train_alone

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


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3, foreach=False)


def data(steps: int = 2) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(4)
    return [
        (torch.randint(40, (4, 6), generator=random), torch.randint(40, (4, 6), generator=random)) for _ in range(steps)
    ]


def run(mesh: str, zero: int, model: Callable[[], nn.Module], body: Callable[[Engine], Any]) -> list[Any]:
    """Run on every rank of a mesh, whose plan ties what the model ties."""
    axes = qs.Mesh.parse(mesh)
    plan = qs.compile("1f1b", mesh=axes, microbatches=4 // axes.axis_size("dp"), zero=zero)

    def start(transport: Transport) -> Any:
        blocks = split(model())
        return body(Engine(plan, blocks, loss_of, adam, tied=blocks.tied, rules=blocks.rules, transport=transport))

    return run_local(axes.size, start, timeout_s=60)


def require_equal(found: nn.Module, expected: nn.Module) -> None:
    theirs = expected.state_dict()
    assert found.state_dict().keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in found.state_dict().items())


@pytest.mark.parametrize(
    ("family", "mesh", "zero"), [(llama, "pp=2", 0), (llama, "tp=2", 0), (gpt2, "dp=2", 3), (qwen3, "dp=2", 1)]
)
def test_there_and_back(tmp_path: Path, family: Callable[..., nn.Module], mesh: str, zero: int) -> None:
    origin = family(1)
    origin.save_pretrained(tmp_path / "in")

    def body(engine: Engine) -> None:
        assert engine.load_pretrained(tmp_path / "in") == LoadedWeights()
        engine.save_pretrained(tmp_path / "untrained")
        for batch in data():
            call_with_share(engine, engine.step, batch)
        engine.save_pretrained(tmp_path / "out")

    run(mesh, zero, family, body)
    require_equal(reloaded(origin, tmp_path / "untrained"), origin)
    found = reloaded(origin, tmp_path / "out").state_dict()
    expected = train_alone(origin, lambda output, targets: loss_of(output.logits, targets), adam, data())
    assert all(torch.allclose(found[name], weight, rtol=1e-9, atol=1e-9) for name, weight in expected.weights.items())


def reloaded(like: nn.Module, folder: Path) -> nn.Module:
    found, info = type(like).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert found.dtype == torch.float64
    return found


def build_only(mesh: str, zero: int, model: nn.Module, body: Callable[[Engine], Any]) -> None:
    """Run with blocks that hold a model's tensors under its names, and cannot be run."""

    def blocks() -> Split:
        return Split(
            [copy.deepcopy(model)],
            own_names={f"0.{name}": name for name in model.state_dict()},
            config=model.config,
            conversions=conversion_mapping.get_model_conversion_mapping(model),
        )

    plan = qs.compile("1f1b", mesh=mesh, microbatches=1, zero=zero)

    def start(transport: Transport) -> Any:
        return body(Engine(plan, blocks(), loss_of, adam, transport=transport, prove="none"))

    run_local(plan.mesh.size, start, timeout_s=60)


@pytest.mark.parametrize(("mesh", "zero"), [("dp=1", 0), ("dp=2", 3)])
def test_experts_stored_one_by_one_are_read_as_one_tensor(tmp_path: Path, mesh: str, zero: int) -> None:
    origin = mixtral(1)
    origin.save_pretrained(tmp_path / "in")
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in load_file(tmp_path / "in" / "model.safetensors")

    def body(engine: Engine) -> None:
        assert engine.load_pretrained(tmp_path / "in") == LoadedWeights()
        engine.save_pretrained(tmp_path / "out")

    build_only(mesh, zero, mixtral(2), body)
    require_equal(reloaded(origin, tmp_path / "out"), origin)


def bert(seed: int = 0) -> nn.Module:
    return made(transformers.BertForMaskedLM, transformers.BertConfig(**SIZES), seed)


def vit(seed: int = 0) -> nn.Module:
    sizes = {name: size for name, size in SIZES.items() if name not in ("vocab_size", "max_position_embeddings")}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3)
    return made(transformers.ViTForImageClassification, config, seed)


@pytest.mark.parametrize("family", [bert, vit])
def test_other_families_by_names_alone(tmp_path: Path, family: Callable[..., nn.Module]) -> None:
    origin = family(1)
    origin.save_pretrained(tmp_path / "in", max_shard_size="5KB")

    def body(engine: Engine) -> None:
        assert engine.load_pretrained(tmp_path / "in") == LoadedWeights()
        engine.save_pretrained(tmp_path / "out", max_file_bytes=5000)

    build_only("dp=2", 3, family(2), body)
    require_equal(reloaded(origin, tmp_path / "out"), origin)
