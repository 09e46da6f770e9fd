"""Parameters in a flat buffer: aligned, each number in exactly one shard, segments where the shards cut them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from quintsched.runtime.weights_and_gradients.flat_buffer import ALIGNMENT, FlatLayout

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=5)


@given(SHAPES, st.integers(1, 5))
def test_the_segments_of_all_shards_are_the_parameters(shapes: list[list[int]], num_shards: int) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    layouts = [FlatLayout.sharded(tensors, num_shards, index) for index in range(num_shards)]
    assert all(start % ALIGNMENT == 0 for start in layouts[0].starts)
    flat = torch.zeros(layouts[0].size)
    for view, tensor in zip(layouts[0].views(flat), tensors, strict=True):
        view.copy_(tensor)
    found = [torch.full((tensor.numel(),), torch.nan) for tensor in tensors]
    owners = [0] * len(tensors)
    for layout in layouts:
        shard = layout.shard(flat)
        owners = [count + (segment is not None) for count, segment in zip(owners, layout.segments(), strict=True)]
        assert shard.shape == (layout.shard_size,)
        for numbers, segment in zip(found, layout.segments(), strict=True):
            if segment is not None:
                assert numbers[segment.start : segment.stop].isnan().all(), "two shards hold the same number"
                numbers[segment.start : segment.stop] = segment.view_of(shard)
    assert all(torch.equal(numbers, tensor.flatten()) for numbers, tensor in zip(found, tensors, strict=True))
    assert all(owners), "a parameter without numbers has an owner, which saves it"


def test_packed_parameters_lie_side_by_side() -> None:
    layout = FlatLayout.sharded([torch.ones(2, 3), torch.ones(()), torch.ones(5)], multiple=1)
    assert layout.starts == (0, 6, 7)
    assert layout.size == layout.shard_size == 12
