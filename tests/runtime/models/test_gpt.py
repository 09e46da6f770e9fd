"""The causal transformer: what a token may see, in one piece, in slices, and cut over tensor-parallel ranks."""

import copy
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quintsched.errors import MisfitError, UsageError
from quintsched.runtime.blocks.block_outlines import accepted_extras, build_model
from quintsched.runtime.comm import Transport, run_local
from quintsched.runtime.data import DataSpec
from quintsched.runtime.launch.worker import main
from quintsched.runtime.models import build_model as build_blocks
from quintsched.runtime.models import tied_weights
from quintsched.runtime.models.gpt import Embedding, GPTOptions, gpt, gpt_tied
from quintsched.runtime.models.layers import Attention
from quintsched.runtime.parallel.tensor.cut_module import apply_tensor_parallel, gather_full, shard_of
from quintsched.runtime.settings.job_file import ModelConfig

from ...helpers.jobs import COUNTING

TEXT = DataSpec(input_shape=(12,), num_classes=20)
SMALL = GPTOptions(hidden=16, depth=2, heads=4)


def build(data: DataSpec = TEXT, options: GPTOptions = SMALL) -> nn.Sequential:
    """Return a model whose attention has something to say: at their first values the logits are nearly zero."""
    model = build_model(gpt(data, options), dtype=torch.float64)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=random, dtype=torch.float64) / 4
    return model


def draw_ids(*shape: int) -> Tensor:
    return torch.randint(20, shape, generator=torch.Generator().manual_seed(1))


class Joined:
    """Keys and values before a slice, kept in one graph: the simplest `past` of a block."""

    def __init__(self) -> None:
        self.seen = 0
        self._before: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def extend(self, site: nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if site in self._before:
            old_keys, old_values = self._before[site]
            keys, values = torch.cat([old_keys, keys], -2), torch.cat([old_values, values], -2)
        self._before[site] = keys, values
        return keys, values


def run_in_slices(model: nn.Sequential, ids: Tensor, bounds: Sequence[int]) -> Tensor:
    past, pieces = Joined(), []
    for start, end in pairwise(bounds):
        past.seen = start
        given = ids[:, start:end]
        for block in model:
            given = block(given, past=past) if accepted_extras(block)("past") else block(given)
        pieces.append(given)
    return torch.cat(pieces, 1)


@settings(max_examples=10, deadline=None)
@given(
    samples=st.integers(1, 3),
    length=st.integers(1, 9),
    vocabulary=st.integers(1, 7),
    heads=st.integers(1, 3),
    depth=st.integers(1, 3),
)
def test_shapes(samples: int, length: int, vocabulary: int, heads: int, depth: int) -> None:
    blocks = gpt(
        DataSpec(input_shape=(9,), num_classes=vocabulary), GPTOptions(hidden=4 * heads, heads=heads, depth=depth)
    )
    model = build_model(blocks)
    ids = torch.randint(vocabulary, (samples, length))
    assert len(model) == depth + 2
    assert model[0](ids).shape == (samples, length, 4 * heads)
    assert model(ids).shape == (samples, length, vocabulary)


def test_a_token_sees_itself_and_what_came_before() -> None:
    model, ids = build(), draw_ids(2, 12)
    logits = model(ids)
    for place in range(12):
        changed = ids.clone()
        changed[:, place] = (changed[:, place] + 1) % 20
        differs = (model(changed) - logits).abs().amax((0, 2)) > 1e-9
        assert differs.tolist() == [at >= place for at in range(12)]


def test_attention_is_torchs_multihead_attention() -> None:
    torch.manual_seed(0)
    ours, theirs = Attention(16, num_heads=4), nn.MultiheadAttention(16, 4, batch_first=True)
    theirs.load_state_dict(
        {
            "in_proj_weight": ours.qkv.weight,
            "in_proj_bias": ours.qkv.bias,
            "out_proj.weight": ours.proj.weight,
            "out_proj.bias": ours.proj.bias,
        }
    )
    tokens = torch.randn(2, 5, 16)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected = theirs(tokens, tokens, tokens, attn_mask=hidden, need_weights=False)[0]
    torch.testing.assert_close(ours(tokens, None), expected)


@pytest.mark.parametrize("bounds", [(0, 12), (0, 6, 12), (0, 4, 8, 12), (0, 1, 2, 9, 12)])
def test_slices_give_the_whole(bounds: tuple[int, ...]) -> None:
    whole, ids = build(), draw_ids(2, 12)
    sliced = copy.deepcopy(whole)
    wanted, found = whole(ids), run_in_slices(sliced, ids, bounds)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    seed = torch.randn(wanted.shape, dtype=torch.float64)
    wanted.backward(seed)
    found.backward(seed)
    for (name, parameter), other in zip(whole.named_parameters(), sliced.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=0, atol=1e-11, msg=name)


def test_tensor_parallel() -> None:
    full, ids = build(), draw_ids(3, 7)
    fresh = copy.deepcopy(full)
    wanted = full(ids)
    wanted.square().sum().backward()

    def body(transport: Transport) -> set[str]:
        group = transport.make_group([tuple(range(transport.world_size))])
        model = apply_tensor_parallel(copy.deepcopy(fresh), group, {"0.tokens": "vocabulary"})
        logits = model(ids)
        logits.square().sum().backward()
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-10)
        torch.testing.assert_close(run_in_slices(model, ids, (0, 3, 7)), wanted, rtol=0, atol=1e-10)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            grad = gather_full(parameter.grad, group, shard_of(parameter))
            torch.testing.assert_close(grad, full.get_parameter(name).grad, rtol=1e-10, atol=1e-10, msg=name)
        return {name for name, parameter in model.named_parameters() if shard_of(parameter)}

    block = ("attention.qkv.weight", "attention.qkv.bias", "attention.proj.weight")
    mlp = ("mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight")
    cut = {f"{number}.{name}" for number in (1, 2) for name in block + mlp} | {"0.tokens.weight", "3.head.weight"}
    assert run_local(2, body) == [cut] * 2
    assert run_local(4, body) == [cut] * 4


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


def test_it_learns_to_repeat() -> None:
    """Each sequence is a few tokens over and over: only by looking back can the next one be told."""
    torch.manual_seed(0)
    model = build_model(gpt(TEXT, GPTOptions(hidden=32, depth=2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(100):
        text = torch.randint(20, (32, 3)).repeat(1, 5)[:, :13]
        logits = model(text[:, :-1])[:, 3:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 4:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    assert loss.item() < 0.5


def test_meta_device() -> None:
    with torch.device("meta"):
        model = build_model(gpt(TEXT, SMALL))
        assert model(torch.zeros(4, 12, dtype=torch.long)).shape == (4, 12, 20)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_tied_weights_have_one_shape() -> None:
    options = GPTOptions(hidden=16, depth=3, tied=True)
    model = build_model(gpt(TEXT, options))
    names = gpt_tied(options)["embedding"]
    assert names == ("0.tokens.weight", "4.head.weight")
    assert {tuple(model.get_parameter(name).shape) for name in names} == {(20, 16)}
    assert gpt_tied(SMALL) == {}


@pytest.mark.parametrize("make_past", [lambda: None, Joined])
def test_misfits(make_past: Callable[[], Joined | None]) -> None:
    with pytest.raises(MisfitError, match=r"sequences of token ids \(S,\)"):
        gpt(DataSpec(input_shape=(1, 8, 8), num_classes=10), SMALL)
    with pytest.raises(UsageError, match="hidden=10 does not divide into heads=4"):
        GPTOptions(hidden=10)
    past, seen = make_past(), 0
    if past is not None:
        past.seen = seen = 5
    with pytest.raises(MisfitError, match="built for 12 positions; a sequence has 13"):
        Embedding(20, 12, 16)(draw_ids(1, 13 - seen), past)


def test_registry() -> None:
    options = {"depth": 3, "tied": True}
    assert len(build_blocks(ModelConfig(name="gpt", options=options), TEXT)) == 5
    assert tied_weights(ModelConfig(name="gpt", options=options)) == gpt_tied(GPTOptions(depth=3, tied=True))
    assert tied_weights(ModelConfig()) == {}
    with pytest.raises(UsageError, match="no model 'gtp'; did you mean 'gpt'"):
        tied_weights(ModelConfig(name="gtp"))


JOB = """
model: {name: gpt, options: {hidden: 32, depth: 3, tied: true}}
data: {name: "DATA:load"}
parallel: {mesh: "pp=2", schedule: SCHEDULE, microbatches: 2, slices: SLICES, balance: measured}
train: {epochs: 1, batch_size: 16, optimizer: {name: adam, lr: 0.01}}
runtime: {transport: local, precision: float64}
log: {path: LOG, every: 1}
"""


def test_a_job_trains_a_tied_gpt_in_slices_and_whole_to_the_same_losses(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(COUNTING)
    losses = []
    for schedule, slices in (("seq-1f1b", 4), ("1f1b", 1)):
        log = tmp_path / f"{schedule}.jsonl"
        text = JOB.replace("DATA", str(tmp_path / "data.py")).replace("SCHEDULE", schedule)
        job = tmp_path / "job.yaml"
        job.write_text(text.replace("SLICES", str(slices)).replace("LOG", str(log)))
        assert main(["--config", str(job)]) == 0
        records = [json.loads(line) for line in log.read_text().splitlines()]
        losses.append([record["loss"] for record in records if record["event"] == "step"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-10)
    assert losses[0][-1] < losses[0][0]
