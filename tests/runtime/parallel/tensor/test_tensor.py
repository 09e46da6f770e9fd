"""A cut module against the full one, in float64: outputs, gradients of inputs and of every weight."""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quintsched.errors import MisfitError
from quintsched.runtime.comm import Group, LocalTransport, LocalWorld, Transport, run_local
from quintsched.runtime.parallel.tensor.apply_tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TpShard,
    VocabParallelEmbedding,
    apply_tensor_parallel,
    gather_full,
    shard_of,
    take_shard,
)

from ....helpers.blocks import of_kind
from ...trials import engine_of

TIGHT = {"rtol": 0, "atol": 1e-12}


class Attention(nn.Module):
    """Self-attention that takes its number of heads from the width of its projections."""

    def __init__(self, names: tuple[str, ...], row: str, width: int = 8, heads: int = 4, kv_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = heads
        self.head_dim = width // heads
        self.names, self.row = names, row
        kv = kv_heads * self.head_dim
        if len(names) == 1:
            setattr(self, names[0], nn.Linear(width, 3 * width))
        else:
            self.num_kv_heads = kv_heads
            for name, out in zip(names, (width, kv, kv), strict=True):
                setattr(self, name, nn.Linear(width, out))
        setattr(self, row, nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        outs = [getattr(self, name)(x) for name in self.names]
        q, k, v = outs[0].chunk(3, -1) if len(outs) == 1 else outs
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(-2, -3) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return getattr(self, self.row)(y.transpose(-2, -3).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, bias: bool = True, hidden: int = 24) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, hidden, bias)
        self.fc2 = nn.Linear(hidden, 8, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x)))


def gated(self: Any, x: Tensor) -> Tensor:
    return self["down_proj"](nn.functional.silu(self["gate_proj"](x)) * self["up_proj"](x))


def gates() -> nn.Module:
    layers = {"gate_proj": nn.Linear(8, 12, bias=False), "up_proj": nn.Linear(8, 12), "down_proj": nn.Linear(12, 8)}
    return of_kind(nn.ModuleDict, gated)(layers)


def layers() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(8), Attention(("qkv",), "proj"), nn.LayerNorm(8), Mlp())


def seeded(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
    return module.double()


def lone_group(size: int = 2) -> Group:
    """The first end of a group nobody else is in: for what must fail, or work, without communication."""
    return LocalTransport(LocalWorld(size, timeout_s=0.01), 0).world_group()


def check_equal(full: nn.Module, x: Tensor, size: int, rules: Mapping[str, str] | None = None) -> list[set[str]]:
    """Run `full` whole and cut over `size` ranks; return the names of each rank's cut parameters."""
    wanted_x = leaf(x)
    wanted = full(wanted_x)
    seed = torch.randn(wanted.shape, dtype=wanted.dtype, generator=torch.Generator().manual_seed(3))
    wanted.backward(seed)
    wanted_grads = {name: param.grad for name, param in full.named_parameters()}
    fresh = copy.deepcopy(full)

    def body(t: Transport) -> set[str]:
        group, my_x = t.world_group(), leaf(x)
        module = apply_tensor_parallel(copy.deepcopy(fresh), group, rules)
        y = module(my_x)
        y.backward(seed)
        torch.testing.assert_close((y, my_x.grad), (wanted, wanted_x.grad), **TIGHT)
        for name, param in module.named_parameters():
            torch.testing.assert_close(gather_full(param, group), full.get_parameter(name).detach(), **TIGHT)
            grad = gather_full(param.grad, group, shard_of(param))
            torch.testing.assert_close(grad, wanted_grads[name], msg=name, **TIGHT)
        assert dict(module.named_parameters()).keys() == wanted_grads.keys()
        return {name for name, param in module.named_parameters() if shard_of(param)}

    return run_local(size, body)


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_(x.is_floating_point())


ATTENTIONS = [
    (("qkv",), "proj"),
    (("q", "k", "v"), "out_proj"),
    (("q_proj", "k_proj", "v_proj"), "o_proj"),
    (("query", "key", "value"), "out"),
    (("wq", "wk", "wv"), "wo"),
]


def both(*layers: str) -> set[str]:
    return {f"{layer}.{name}" for layer in layers for name in ("weight", "bias")}


OF_LAYERS = both("1.qkv", "3.fc1") | {"1.proj.weight", "3.fc2.weight"}
THREE = partial(nn.Sequential, nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
EQUAL: list[tuple[Any, tuple[int, ...], int, dict[str, str], set[str]]] = [
    *(
        (partial(Attention, names, row), (2, 5, 8), 2 + 2 * (row == "proj"), {}, both(*names) | {f"{row}.weight"})
        for names, row in ATTENTIONS
    ),
    *((Mlp, shape, 3, {}, both("fc1") | {"fc2.weight"}) for shape in ((3, 8), (8,), (2, 1, 3, 8))),
    (gates, (2, 3, 8), 2, {}, both("up_proj") | {"gate_proj.weight", "down_proj.weight"}),
    (partial(Mlp, False), (2, 5, 8), 3, {}, {"fc1.weight", "fc2.weight"}),
    (
        lambda: nn.Sequential(nn.Linear(6, 8), layers(), nn.Linear(8, 3)),
        (2, 5, 6),
        2,
        {},
        {f"1.{n}" for n in OF_LAYERS},
    ),
    (lambda: nn.Sequential(nn.Linear(8, 6)), (2, 5, 8), 2, {"0": "column"}, both("0")),
    (lambda: nn.Linear(8, 6), (2, 5, 8), 2, {"*": "row"}, {"weight"}),
    (layers, (2, 5, 8), 2, {"3.fc2": "replicate", "3.*": "replicate"}, both("1.qkv") | {"1.proj.weight"}),
    (THREE, (3, 8), 2, {"0": "column", "*": "row"}, both("0") | {"2.weight"}),
    (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 3, 8), 2, {}, set()),
]


@pytest.mark.parametrize(("make", "shape", "size", "rules", "cut"), EQUAL)
def test_a_cut_module_equals_the_full_one(make, shape, size, rules, cut) -> None:
    assert check_equal(seeded(make()), torch.randn(shape).double(), size, rules) == [cut] * size


def test_vocab_embedding_equals_the_full_one() -> None:
    ids = torch.tensor([[0, 5, 3], [11, 5, 6]])
    for padding in (None, 5, 11):
        full = seeded(nn.Sequential(nn.Embedding(12, 4, padding_idx=padding), nn.Linear(4, 8), Mlp()))
        cut = check_equal(full, ids, 3, {"0": "vocabulary"})
        assert "0.weight" in cut[0]


ENCODER = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
GROUPED = Attention(("q_proj", "k_proj", "v_proj"), "o_proj", kv_heads=2)
BETWEEN = nn.Sequential(nn.Linear(4, 6), nn.Linear(8, 6))
TIED = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
TIED["head"].weight = TIED["embed"].weight
MISFITS: list[tuple[nn.Module, int, dict[str, str], str]] = [
    (layers(), 3, {}, r"tp=3 does not divide the 4 heads of '1'; choose tp from 1, 2, 4$"),
    (GROUPED, 4, {}, r"tp=4 does not divide the 2 key/value heads of ''; choose tp from 1, 2"),
    (Mlp(), 5, {}, r"tp=5 does not divide the 24 output features of 'fc1'; choose tp from 1, 2, 3, 4, 6, 8, 12, 24$"),
    (nn.Sequential(nn.Linear(4, 6)), 3, {"0": "row"}, r"tp=3 does not divide the 4 input features of '0'"),
    (nn.Sequential(nn.Embedding(5, 2)), 2, {"0": "vocabulary"}, r"tp=2 does not divide the 5 ids of '0' \(or pad"),
    (nn.Sequential(nn.Linear(4, 5)), 2, {"0": "vocabulary"}, r"tp=2 does not divide the 5 ids of '0' \(or pad"),
    (nn.Sequential(nn.Embedding(4, 6)), 2, {"0": "column"}, r"'0' cannot be cut as 'column'"),
    (BETWEEN, 2, {"0": "column", "1": "row"}, r"'0' has 6 outputs, but"),
    (ENCODER, 2, {"*out_proj": "row"}, r"'self_attn\.out_proj', but TransformerEncoderLayer '' uses the weights"),
    (TIED, 2, {"embed": "vocabulary"}, "'embed' cannot be cut: it, or its weight, is used in several places"),
]


@pytest.mark.parametrize(("module", "size", "rules", "message"), MISFITS)
def test_sizes_and_rules_that_do_not_fit_say_what_to_do(module, size, rules, message) -> None:
    with pytest.raises(MisfitError, match=message):
        apply_tensor_parallel(module, lone_group(size), rules)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@pytest.mark.parametrize("mesh", ["pp=1", "pp=2"])
def test_modules_of_torch_jit_are_refused_on_every_mesh(mesh: str) -> None:
    scripted = torch.jit.script(nn.Tanh())
    blocks = [nn.Sequential(nn.Linear(8, 8), scripted), scripted]
    for part, name in (blocks, "'0.1'"), (blocks[::-1], "'0'"):
        with pytest.raises(MisfitError, match=rf"{name} is a module of torch\.jit, whose .* give the module itself"):
            run_local(int(mesh[-1]), lambda transport, part=part: engine_of(transport, part, mesh=mesh))
    with pytest.raises(MisfitError, match=r"'fc1' is a module of torch\.jit"):
        apply_tensor_parallel(nn.ModuleDict({"fc1": scripted}), lone_group())


def test_other_refusals() -> None:
    group, row = lone_group(), RowParallelLinear(8, 4, lone_group(), bias=False)
    clipped = nn.Embedding(4, 4, max_norm=1.0)
    for call, words in (
        (lambda: VocabParallelEmbedding.from_embedding(clipped, group), "max_norm"),
        (lambda: row(torch.zeros(2, 8)), r"takes 4 of 8 features, but its input is \(2, 8\)"),
        (lambda: take_shard(torch.zeros(6, 2), TpShard(0, 1, 0, 4)), "tp=4 does not divide the 6 features"),
        (lambda: gather_full(torch.zeros(2), group, TpShard(0, 1, 0, 3)), "into 3 cannot be gathered over"),
    ):
        with pytest.raises(MisfitError, match=words):
            call()


def test_ids_out_of_range_raise_on_every_rank() -> None:
    def body(t: Transport) -> None:
        layer = VocabParallelEmbedding.from_embedding(nn.Embedding(12, 4), t.world_group())
        for bad in (-1, 12):
            with pytest.raises(IndexError):
                layer(torch.tensor([0, bad]))

    run_local(3, body)


def test_ranks_that_start_from_different_parameters_are_refused_on_all() -> None:
    def body(t: Transport) -> None:
        block = seeded(layers())
        with torch.no_grad():
            block.get_parameter("0.bias").add_(t.rank)
        with pytest.raises(MisfitError, match=r"1 of 12 parameters differ between the ranks .* first '0\.bias'"):
            apply_tensor_parallel(block, t.world_group())
        linear = nn.Linear(4, 4)
        nn.init.constant_(linear.bias, t.rank)
        with pytest.raises(MisfitError, match="'bias'"):
            RowParallelLinear.from_linear(linear, t.world_group())

    run_local(2, body)


def test_slices_keep_dtype_flags_and_mode() -> None:
    full = nn.Linear(4, 4, dtype=torch.bfloat16).eval()
    full.bias.requires_grad_(False)
    layer = ColumnParallelLinear.from_linear(full, lone_group())
    assert (layer.weight.dtype, layer.weight.requires_grad, layer.training) == (torch.bfloat16, True, False)
    assert not layer.bias.requires_grad
    assert layer.weight.data_ptr() != full.weight.data_ptr()
    assert torch.equal(layer.weight, full.weight[:2])


def test_a_replicated_parameter_inside_a_cut_region_is_found_at_the_first_backward() -> None:
    class Scaled(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(self.fc1(x) * self.slope)

    def body(t: Transport) -> None:
        module = apply_tensor_parallel(seeded(Scaled()), t.world_group())
        x = torch.ones(3, 8, dtype=torch.float64)
        with pytest.raises(MisfitError, match=r"gradient of 'slope' differs .*rules={'fc1': 'replicate', "):
            module(x).square().sum().backward()

    run_local(2, body)


def test_shards_survive_copies_casts_loading_and_the_meta_device() -> None:
    def body(t: Transport) -> None:
        group = t.world_group()
        with torch.device("meta"):
            bare = apply_tensor_parallel(Mlp(), group)
        cut = apply_tensor_parallel(seeded(Mlp()), group)
        expected = {name: shard_of(param) for name, param in cut.named_parameters()}
        assert expected["fc2.weight"] == TpShard(1, 1, t.rank, 2)
        moved = bare.to_empty(device="cpu")
        assigned = copy.deepcopy(cut)
        assigned.load_state_dict({k: v.clone() for k, v in cut.state_dict().items()}, assign=True)
        for module in (copy.deepcopy(cut), moved, assigned, copy.deepcopy(cut).float()):
            assert {name: shard_of(param) for name, param in module.named_parameters()} == expected

    run_local(2, body)
