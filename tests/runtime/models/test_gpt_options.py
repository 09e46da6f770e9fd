"""The parts a causal transformer may be made of: what they compute, and that every mesh computes the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import quintsched as qs
from quintsched.errors import MisfitError, UsageError
from quintsched.runtime.autograd.slice_kv_cache import Past, Store
from quintsched.runtime.blocks.block_builders import Blocks, build_model
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models.gpt import GPTOptions, MoEGPTOptions, gpt, gpt_sizes, gpt_tied, moe_gpt, moe_gpt_sizes
from quintsched.runtime.models.layers import Attention, Rotary, SwiGlu
from quintsched.runtime.parallel.tensor.apply_tensor_parallel import apply_tensor_parallel, shard_of
from quintsched.strategies.descriptions.parameters import total

from ..toys import CLASSES, ids_task, train_plainly, train_rank, worst_difference

small = partial(GPTOptions, hidden=16, heads=4, depth=3)
CHOICES = {
    "llama": small(kv_heads=2, norm="rmsnorm", positions="rope", activation="swiglu", tied=True),
    "grouped": small(kv_heads=2),
    "rope": small(positions="rope"),
    "gated": small(norm="rmsnorm", activation="swiglu"),
    "wide heads": small(head_size=6, ffn=40, biases=False),
    "qwen": small(
        kv_heads=2,
        head_size=6,
        ffn=24,
        norm="rmsnorm",
        positions="rope",
        activation="swiglu",
        biases=False,
        qk_norm=True,
        rope_base=1e6,
        tied=True,
    ),
}


def lively_gpt(options: GPTOptions, length: int = 8) -> Blocks:
    """A model whose attention has something to say: at their first values all weights are nearly zero."""

    def shaken(build: Callable[[], nn.Module]) -> nn.Module:
        block = build()
        with torch.no_grad():
            for parameter in block.parameters():
                parameter += torch.randn(parameter.shape, device=parameter.device) / 4
        return block

    data = DataSpec(input_shape=(length,), num_classes=CLASSES)
    return [partial(shaken, build) for build in gpt(data, options)]


@pytest.mark.parametrize("more", [{}, {"sequence_parallel": True}, {"rules": {"*.attention.*": "replicate"}}])
def test_norms_of_heads_have_the_gradients_of_all_heads(more: dict[str, Any]) -> None:
    options = CHOICES["qwen"]
    task, blocks = ids_task(3, 8, length=8), lively_gpt(options)
    plan = qs.compile("1f1b", mesh="tp=2", microbatches=4)
    settings: dict[str, Any] = {"clip": 1.0, "dtype": torch.float64, "tied": gpt_tied(options)}
    outcomes = run_local(2, lambda transport: train_rank(transport, plan, task, blocks, **settings, **more))
    assert worst_difference(outcomes, train_plainly(task, blocks, 4, **settings)) <= 1e-10


@pytest.mark.parametrize("choice", CHOICES)
def test_predictions_count_the_weights_of_the_built_model(choice: str) -> None:
    data, options = DataSpec(input_shape=(8,), num_classes=CLASSES), CHOICES[choice]
    weights = dict(build_model(gpt(data, options)).named_parameters())
    held = {others[-1] for others in gpt_tied(options).values()}
    assert total(gpt_sizes(data, options)) == sum(w.numel() for name, w in weights.items() if name not in held)


def test_predictions_count_the_weights_of_experts() -> None:
    data = DataSpec(input_shape=(8,), num_classes=CLASSES)
    options = MoEGPTOptions(hidden=16, heads=4, depth=2, head_size=6, ffn=20, biases=False, shared_experts=2)
    assert total(moe_gpt_sizes(data, options)) == sum(
        w.numel() for w in build_model(moe_gpt(data, options)).parameters()
    )


@pytest.mark.parametrize(("one", "other"), [({"ffn": 48}, {"mlp_ratio": 3}), ({}, {"kv_heads": 4})])
def test_what_is_said_in_two_ways_is_one_model(one: dict[str, Any], other: dict[str, Any]) -> None:
    data = DataSpec(input_shape=(8,), num_classes=CLASSES)
    found, same = (build_model(gpt(data, small(**options))).state_dict() for options in (one, other))
    assert found.keys() == same.keys()
    assert all(torch.equal(weight, same[name]) for name, weight in found.items())


def test_queries_and_keys_are_normalised_by_head() -> None:
    torch.manual_seed(0)
    plain, normed = Attention(16, 4, 2), Attention(16, 4, 2, qk_norm=True)
    normed.load_state_dict(plain.state_dict(), strict=False)
    query, key, value = plain._heads(tokens := torch.randn(2, 5, 16))
    query, key = (heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt() for heads in (query, key))
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(normed(tokens, None), plain.proj(mixed.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize(
    ("options", "absent", "present"),
    [
        ({"kv_heads": 2}, "1.attention.qkv.weight", "1.attention.k_proj.weight"),
        ({"norm": "rmsnorm"}, "1.norm1.bias", "4.norm.weight"),
        ({"positions": "rope"}, "0.positions.weight", "0.tokens.weight"),
        ({"activation": "swiglu"}, "1.mlp.fc1.weight", "1.mlp.gate_up.weight"),
        ({"biases": False, "kv_heads": 2}, "1.mlp.fc1.bias", "1.attention.q_proj.weight"),
    ],
)
def test_each_option_changes_its_part(options: dict[str, Any], absent: str, present: str) -> None:
    data, ids = DataSpec(input_shape=(8,), num_classes=CLASSES), torch.arange(8)[None]
    default, chosen = build_model(gpt(data, small())), build_model(gpt(data, small(**options)))
    names = dict(chosen.named_parameters())
    assert absent in dict(default.named_parameters())
    assert absent not in names
    assert present in names
    assert (default(ids) - chosen(ids)).abs().max() > 1e-5


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_queries_are_full_attention_with_repeated_keys(num_kv_heads: int) -> None:
    torch.manual_seed(0)
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


def test_slices_keep_keys_as_few_as_they_are() -> None:
    attention, store = Attention(16, 4, num_kv_heads=1), Store()
    attention(torch.randn(2, 3, 16), Past(store, 0, slices=2, length=3))
    assert [tuple(row.whole.shape) for row in store.rows.values()] == [(2, 1, 6, 4)] * 2


def test_rotary_is_a_complex_rotation() -> None:
    heads = torch.randn(2, 3, 5, 8)
    places, speeds = torch.arange(4, 9), 10_000.0 ** -(torch.arange(4) / 4)
    turns = torch.polar(torch.ones(5, 4), places[:, None] * speeds)
    turned = torch.complex(heads[..., :4], heads[..., 4:]) * turns
    expected = torch.cat([turned.real, turned.imag], -1)
    torch.testing.assert_close(Rotary(8, 9)(heads, 4), expected)
    torch.testing.assert_close(Rotary(8, 9, 500.0)(heads, 4)[..., 0], expected[..., 0])  # the fastest pair: any base
    assert (Rotary(8, 9, 500.0)(heads, 4) - expected).abs().max() > 0.1


def test_rotary_products_depend_on_the_distance_alone() -> None:
    rotary, (query, key) = Rotary(8, 40), torch.randn(2, 1, 1, 1, 8)
    products = [[(rotary(query, at) * rotary(key, at - by)).sum().item() for at in (9, 20, 39)] for by in (0, 3, 9)]
    for same in products:
        assert same == pytest.approx([same[0]] * 3, abs=1e-5)
    assert len({round(same[0], 3) for same in products}) == 3


def test_swiglu() -> None:
    mlp, tokens = SwiGlu(6, 10), torch.randn(3, 6)
    gate, up = functional.linear(tokens, mlp.gate_up.weight, mlp.gate_up.bias).split(10, -1)
    torch.testing.assert_close(mlp(tokens), mlp.fc2(gate * torch.sigmoid(gate) * up))


def test_rmsnorm_divides_by_the_root_of_the_mean_square() -> None:
    norm = build_model(gpt(DataSpec(input_shape=(8,), num_classes=CLASSES), small(norm="rmsnorm")))[1].norm1
    tokens = torch.randn(3, 16)
    torch.testing.assert_close(norm(tokens), tokens / (tokens.square().mean(-1, keepdim=True) + 1e-5).sqrt())


def test_tensor_parallelism_cuts_every_product() -> None:
    model = build_model(gpt(DataSpec(input_shape=(8,), num_classes=CLASSES), CHOICES["llama"]))
    grouped = ("q_proj", "k_proj", "v_proj")
    expected = {f"1.attention.{name}.{kind}" for name in grouped for kind in ("weight", "bias")}
    expected |= {"1.attention.proj.weight", "1.mlp.gate_up.weight", "1.mlp.gate_up.bias", "1.mlp.fc2.weight"}

    def body(transport: Transport) -> set[str]:
        cut = apply_tensor_parallel(copy.deepcopy(model), transport.make_group([(0, 1)]))
        return {name for name, p in cut.named_parameters() if shard_of(p) and name.startswith("1.")}

    assert run_local(2, body) == [expected] * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_heads": 3}, r"heads=4 does not divide into groups for kv_heads=3"),
        ({"kv_heads": 8}, r"heads=4 does not divide into groups for kv_heads=8"),
        ({"positions": "rope", "hidden": 12}, r"a head has 3 \(hidden=12, heads=4\)"),
        ({"positions": "rope", "head_size": 5}, r"a head has 5 \(hidden=16, heads=4\)"),
        ({"heads": 3}, r"hidden=16 does not divide into heads=3; or give head_size"),
        ({"ffn": 40, "mlp_ratio": 2}, r"ffn=40 and mlp_ratio=2 both give the MLP's width; omit one"),
    ],
)
def test_sizes_that_do_not_divide(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        small(**options)


def test_rotary_has_room_for_so_many_positions() -> None:
    model = build_model(gpt(DataSpec(input_shape=(8,), num_classes=CLASSES), CHOICES["rope"]))
    with pytest.raises(MisfitError, match="built for 8 positions; a sequence has 9"):
        model(torch.zeros(1, 9, dtype=torch.int64))
