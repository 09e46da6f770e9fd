import torch
from torch import nn

from quintsched.runtime.models.vit import Attention, PatchEmbedding


def test_patches_are_those_of_a_strided_convolution() -> None:
    embedding = PatchEmbedding(channels=3, patch=2, num_patches=12, hidden=8)
    images = torch.randn(2, 3, 6, 8)
    weight = embedding.proj.weight.reshape(8, 3, 2, 2)
    expected = nn.functional.conv2d(images, weight, embedding.proj.bias, stride=2).flatten(2).mT
    torch.testing.assert_close(embedding(images)[:, 1:] - embedding.positions[:, 1:], expected)


def test_attention_is_torchs_multihead_attention() -> None:
    ours, theirs = Attention(16, num_heads=4), nn.MultiheadAttention(16, 4, batch_first=True)
    ins = {"in_proj_weight": ours.qkv.weight, "in_proj_bias": ours.qkv.bias}
    theirs.load_state_dict(ins | {f"out_proj.{name}": held for name, held in ours.proj.named_parameters()})
    tokens = torch.randn(2, 5, 16)
    torch.testing.assert_close(ours(tokens), theirs(tokens, tokens, tokens, need_weights=False)[0])
