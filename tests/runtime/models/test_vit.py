import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from quintsched.errors import MisfitError, UsageError
from quintsched.runtime.blocks.block_builders import build_block
from quintsched.runtime.data import DataSpec
from quintsched.runtime.models import build_model
from quintsched.runtime.models.vit import Attention, PatchEmbedding, ViTOptions, vit
from quintsched.runtime.settings.job_file import ModelConfig

DIGITS = DataSpec(input_shape=(1, 8, 8), num_classes=10)
SMALL = ViTOptions(hidden=16, depth=2, heads=2)


def build(data: DataSpec = DIGITS, options: ViTOptions = SMALL, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(builder() for builder in vit(data, options)))


@pytest.mark.parametrize(("channels", "rows", "columns", "patch"), [(1, 1, 1, 1), (3, 4, 2, 3)])
def test_shapes(channels: int, rows: int, columns: int, patch: int) -> None:
    data = DataSpec(input_shape=(channels, rows * patch, columns * patch), num_classes=5)
    model = build(data, ViTOptions(hidden=8, depth=1, heads=2, patch=patch))
    images = torch.randn(3, *data.input_shape)
    assert model[0](images).shape == (3, rows * columns + 1, 8)
    assert model(images).shape == (3, 5)


def test_patches_are_those_of_a_strided_convolution() -> None:
    torch.manual_seed(0)
    embedding = PatchEmbedding(channels=3, patch=2, num_patches=12, hidden=8)
    images = torch.randn(2, 3, 6, 8)
    weight = embedding.proj.weight.reshape(8, 3, 2, 2)
    expected = nn.functional.conv2d(images, weight, embedding.proj.bias, stride=2).flatten(2).mT
    torch.testing.assert_close(embedding(images)[:, 1:] - embedding.positions[:, 1:], expected)


def test_attention_is_torchs_multihead_attention() -> None:
    torch.manual_seed(0)
    ours, theirs = Attention(16, num_heads=4), nn.MultiheadAttention(16, 4, batch_first=True)
    ins = {"in_proj_weight": ours.qkv.weight, "in_proj_bias": ours.qkv.bias}
    theirs.load_state_dict(ins | {f"out_proj.{name}": held for name, held in ours.proj.named_parameters()})
    tokens = torch.randn(2, 5, 16)
    torch.testing.assert_close(ours(tokens), theirs(tokens, tokens, tokens, need_weights=False)[0])


def test_default_patches() -> None:
    for size, tokens in ((8, 17), (28, 50)):
        embedding = vit(DataSpec(input_shape=(1, size, size), num_classes=10), ViTOptions())[0]()
        assert embedding.positions.shape == (1, tokens, 64)


def test_misfits() -> None:
    with pytest.raises(MisfitError, match="8 x 8 pixels does not divide into patches of 3"):
        vit(DIGITS, ViTOptions(patch=3))
    with pytest.raises(MisfitError, match=r"shape \(C, H, W\)"):
        vit(dataclasses.replace(DIGITS, input_shape=(64,)), SMALL)
    with pytest.raises(UsageError, match="hidden=10 does not divide into heads=4"):
        ViTOptions(hidden=10)


def test_registry() -> None:
    assert len(build_model(ModelConfig(options={"depth": 3}), DIGITS)) == 5
    with pytest.raises(UsageError, match="no model 'vti'; did you mean 'vit'"):
        build_model(ModelConfig(name="vti"), DIGITS)
    with pytest.raises(UsageError, match=r"model.options.dept: unknown key; did you mean 'depth'"):
        build_model(ModelConfig(options={"dept": 3}), DIGITS)


def test_a_users_model(tmp_path: Path) -> None:
    file = tmp_path / "my_model.py"
    file.write_text(
        "from torch import nn\n"
        "def build(data, width=3):\n"
        "    return [nn.Flatten, nn.Linear(data.input_shape[1] * data.input_shape[2], width)]\n"
        "def wrong(data):\n"
        "    return 3\n"
    )
    blocks = build_model(ModelConfig(name=f"{file}:build", options={"width": 4}), DIGITS)
    model = nn.Sequential(*(build_block(block, number) for number, block in enumerate(blocks)))
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 4)
    with pytest.raises(UsageError, match="unexpected keyword argument 'widht'"):
        build_model(ModelConfig(name=f"{file}:build", options={"widht": 4}), DIGITS)
    with pytest.raises(UsageError, match="did not return a list"):
        build_model(ModelConfig(name=f"{file}:wrong"), DIGITS)
