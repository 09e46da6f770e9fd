"""Shapes: told as numbers, found on the meta device, agreed by a hash."""

import pytest
import torch
from torch import Tensor, nn

import quintsched as qs
from quintsched.runtime.agreement.refuse_unequal_ranks import agree
from quintsched.runtime.blocks.shape_inference import trace_shapes
from quintsched.runtime.blocks.trees import TensorSpec, TreeSpec
from quintsched.runtime.comm import Transport, run_local

from ..toys import tiny_vit


def test_shapes_are_found_without_data_or_memory() -> None:
    parcels = trace_shapes(tiny_vit(), TreeSpec.plain(TensorSpec((2, 1, 8, 8), torch.float64)), {}, torch.float64)
    specs = [parcel.output.tensors[0] for parcel in parcels]
    assert [spec.shape for spec in specs] == [(2, 17, 16)] * 5 + [(2, 10)]
    assert {spec.dtype for spec in specs} == {torch.float64}
    huge = [lambda: nn.Linear(10**6, 10**6, bias=False)]
    (left,) = trace_shapes(huge, TreeSpec.plain(TensorSpec((10**6, 10**6), torch.float32)), {})
    assert left.output.tensors[0].shape == (10**6, 10**6)


def test_ranks_that_differ_are_told_so_on_every_rank() -> None:
    refused = []

    def run(transport: Transport) -> None:
        group = transport.make_group([(0, 1, 2)])
        agree("the weather", "sun", group)
        with pytest.raises(qs.MisfitError, match="do not agree on the weather"):
            agree("the weather", "rain" if transport.rank == 2 else "sun", group)
        refused.append(transport.rank)

    run_local(3, run)
    assert sorted(refused) == [0, 1, 2]


class Noisy(nn.Module):
    """Makes a tensor where torch makes them by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + torch.rand(4, dtype=x.dtype) * torch.arange(4))


def test_blocks_that_make_tensors_without_a_device_have_shapes() -> None:
    parcels = trace_shapes([Noisy, Noisy], TreeSpec.plain(TensorSpec((2, 4), torch.float64)), {}, torch.float64)
    assert [str(parcel.output) for parcel in parcels] == ["float64 (2, 4)"] * 2
