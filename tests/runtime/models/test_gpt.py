"""The causal transformer: the parts that it may be made of, and what they compute."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError, UsageError
from quintsched.runtime.blocks.block_builders import build_model
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, MoEGPTOptions, gpt, gpt_sizes, gpt_tied, moe_gpt, moe_gpt_sizes
from quintsched.runtime.models.layers import Attention, Rotary, SwiGlu
from quintsched.runtime.models.vit import PatchEmbedding
from quintsched.runtime.models.vit import VitAttention as ViTAttention
from quintsched.strategies.descriptions.parameters import total

from ..toys import CLASSES

DATA = DataSpec(input_shape=(8,), num_classes=CLASSES)
small = partial(GPTOptions, hidden=16, heads=4, depth=3)
QWEN = {"head_size": 6, "ffn": 24, "biases": False, "qk_norm": True, "rope_base": 1e6}
CHOICES = {
    "llama": small(kv_heads=2, norm="rmsnorm", positions="rope", activation="swiglu", tied=True),
    "wide heads": small(head_size=6, ffn=40, biases=False),
    "qwen": small(kv_heads=2, norm="rmsnorm", positions="rope", activation="swiglu", tied=True, **QWEN),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_predictions_count_the_weights_of_the_built_model(choice: str) -> None:
    options = CHOICES[choice]
    weights = dict(build_model(gpt(DATA, options)).named_parameters())
    held = {others[-1] for others in gpt_tied(options).values()}
    assert total(gpt_sizes(DATA, options)) == sum(w.numel() for name, w in weights.items() if name not in held)
    mixture = MoEGPTOptions(hidden=16, heads=4, depth=2, head_size=6, ffn=20, biases=False, shared_experts=2)
    built = build_model(moe_gpt(DATA, mixture)).parameters()
    assert total(moe_gpt_sizes(DATA, mixture)) == sum(w.numel() for w in built)


def test_queries_and_keys_are_normalised_by_head() -> None:
    plain, normed = Attention(16, 4, 2), Attention(16, 4, 2, qk_norm=True)
    normed.load_state_dict(plain.state_dict(), strict=False)
    query, key, value = plain._heads(tokens := torch.randn(2, 5, 16))
    query, key = (heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt() for heads in (query, key))
    mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(normed(tokens, None), plain.proj(mixed.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_queries_are_full_attention_with_repeated_keys(num_kv_heads: int) -> None:
    grouped, full = Attention(16, 4, num_kv_heads), Attention(16, 4)

    def repeated(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (num_kv_heads, 4)).repeat_interleave(4 // num_kv_heads, 0).flatten(0, 1)

    query, key, value = (layer.state_dict() for layer in (grouped.q_proj, grouped.k_proj, grouped.v_proj))
    rows = {name: torch.cat([query[name], repeated(key[name]), repeated(value[name])]) for name in query}
    full.load_state_dict(
        {f"qkv.{name}": row for name, row in rows.items()}
        | {f"proj.{name}": t for name, t in grouped.proj.state_dict().items()}
    )
    tokens = torch.randn(2, 5, 16)
    torch.testing.assert_close(grouped(tokens, None), full(tokens, None))


def test_rotary_is_a_complex_rotation() -> None:
    heads = torch.randn(2, 3, 5, 8)
    places, speeds = torch.arange(4, 9), 10_000.0 ** -(torch.arange(4) / 4)
    turns = torch.polar(torch.ones(5, 4), places[:, None] * speeds)
    turned = torch.complex(heads[..., :4], heads[..., 4:]) * turns
    expected = torch.cat([turned.real, turned.imag], -1)
    torch.testing.assert_close(Rotary(8, 9)(heads, 4), expected)
    torch.testing.assert_close(Rotary(8, 9, 500.0)(heads, 4)[..., 0], expected[..., 0])  # the fastest pair: any base
    assert (Rotary(8, 9, 500.0)(heads, 4) - expected).abs().max() > 0.1


def test_swiglu() -> None:
    mlp, tokens = SwiGlu(6, 10), torch.randn(3, 6)
    gate, up = nn.functional.linear(tokens, mlp.gate_up.weight, mlp.gate_up.bias).split(10, -1)
    torch.testing.assert_close(mlp(tokens), mlp.fc2(gate * torch.sigmoid(gate) * up))


def test_rmsnorm_divides_by_the_root_of_the_mean_square() -> None:
    norm = build_model(gpt(DATA, small(norm="rmsnorm")))[1].norm1
    tokens = torch.randn(3, 16)
    torch.testing.assert_close(norm(tokens), tokens / (tokens.square().mean(-1, keepdim=True) + 1e-5).sqrt())


def test_the_first_values() -> None:
    model = build_model(gpt(DataSpec(input_shape=(64,), num_classes=500), GPTOptions(hidden=128, depth=2)))
    for weight in (model[0].tokens.weight, model[0].positions.weight, model[1].mlp.fc1.weight, model[3].head.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model[1].mlp.fc2.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert not model[1].attention.qkv.bias.any()
    uniform = torch.log(torch.tensor(500.0)).item()
    ids = torch.randint(500, (4, 64))
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    assert loss.item() == pytest.approx(uniform, rel=0.02)


SIZES = [
    ({"kv_heads": 3}, r"heads=4 does not divide into groups for kv_heads=3"),
    ({"kv_heads": 8}, r"heads=4 does not divide into groups for kv_heads=8"),
    ({"positions": "rope", "hidden": 12}, r"a head has 3 \(hidden=12, heads=4\)"),
    ({"positions": "rope", "head_size": 5}, r"a head has 5 \(hidden=16, heads=4\)"),
    ({"heads": 3}, r"hidden=16 does not divide into heads=3; or give head_size"),
    ({"ffn": 40, "mlp_ratio": 2}, r"ffn=40 and mlp_ratio=2 both give the MLP's width; omit one"),
]


def test_misfits() -> None:
    for options, words in SIZES:
        with pytest.raises(UsageError, match=words):
            small(**options)
    ids = torch.zeros(1, 9, dtype=torch.int64)
    with pytest.raises(MisfitError, match=r"sequences of token ids \(S,\)"):
        gpt(DataSpec(input_shape=(1, 8, 8), num_classes=10), small())
    for positions in ("learned", "rope"):
        with pytest.raises(MisfitError, match="built for 8 positions; a sequence has 9"):
            build_model(gpt(DATA, small(positions=positions)))(ids)


def test_patches_are_those_of_a_strided_convolution() -> None:
    embedding = PatchEmbedding(channels=3, patch=2, num_patches=12, hidden=8)
    images = torch.randn(2, 3, 6, 8)
    weight = embedding.proj.weight.reshape(8, 3, 2, 2)
    expected = nn.functional.conv2d(images, weight, embedding.proj.bias, stride=2).flatten(2).mT
    torch.testing.assert_close(embedding(images)[:, 1:] - embedding.positions[:, 1:], expected)


def test_attention_is_torchs_multihead_attention() -> None:
    ours, theirs = ViTAttention(16, num_heads=4), nn.MultiheadAttention(16, 4, batch_first=True)
    ins = {"in_proj_weight": ours.qkv.weight, "in_proj_bias": ours.qkv.bias}
    theirs.load_state_dict(ins | {f"out_proj.{name}": held for name, held in ours.proj.named_parameters()})
    tokens = torch.randn(2, 5, 16)
    torch.testing.assert_close(ours(tokens), theirs(tokens, tokens, tokens, need_weights=False)[0])
