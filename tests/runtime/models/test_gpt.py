"""The causal transformer: what a token may see, in one piece, in slices, and cut over tensor-parallel ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quintsched.errors import MisfitError, UsageError
from quintsched.runtime.blocks.block_builders import build_model
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models import build_model as build_blocks
from quintsched.runtime.models import tied_weights
from quintsched.runtime.models.gpt import Embedding, GPTOptions, gpt, gpt_tied
from quintsched.runtime.settings.job_file import ModelConfig

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


def test_tied_weights_have_one_shape() -> None:
    options = GPTOptions(hidden=16, depth=3, tied=True)
    model = build_model(gpt(TEXT, options))
    names = gpt_tied(options)["embedding"]
    assert names == ("0.tokens.weight", "4.head.weight")
    assert {tuple(model.get_parameter(name).shape) for name in names} == {(20, 16)}
    assert gpt_tied(SMALL) == {}


def test_misfits() -> None:
    with pytest.raises(MisfitError, match=r"sequences of token ids \(S,\)"):
        gpt(DataSpec(input_shape=(1, 8, 8), num_classes=10), SMALL)
    with pytest.raises(UsageError, match="hidden=10 does not divide into heads=4"):
        GPTOptions(hidden=10)
    with pytest.raises(MisfitError, match="built for 12 positions; a sequence has 13"):
        Embedding(20, 12, 16)(draw_ids(1, 13), None)


def test_registry() -> None:
    options = {"depth": 3, "tied": True}
    assert len(build_blocks(ModelConfig(name="gpt", options=options), TEXT)) == 5
    assert tied_weights(ModelConfig(name="gpt", options=options)) == gpt_tied(GPTOptions(depth=3, tied=True))
    assert tied_weights(ModelConfig()) == {}
    with pytest.raises(UsageError, match="no model 'gtp'; did you mean 'gpt'"):
        tied_weights(ModelConfig(name="gtp"))
